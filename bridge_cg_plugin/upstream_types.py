"""Names for upstream's objects in signatures. Type checkers treat their attributes as Any."""

from typing import Any

# An `nn.Module` whose parts and settings are read by the names that upstream gave them.
type UpstreamModule = Any
# An `nn.Parameter` with Megatron's `main_grad` and `grad_added_to_main_grad`.
type MegatronParameter = Any
