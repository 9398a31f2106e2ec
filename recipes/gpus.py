"""How large buckets of vision graphs may be on each kind of GPU."""

from collections.abc import Mapping

# Tokens (patches) of the largest bucket. A slot took 9.2 GiB at 6720 tokens and 20.6 GiB at 16384 on an H200
# (docs/benchmarks/); the others follow from that line and from what the GPU's memory leaves beside weights and
# optimizer state. Buckets that no microbatch asks for take no memory.
GPUS: Mapping[str, int] = {"h100": 8192, "h200": 16384, "b200": 24576}
