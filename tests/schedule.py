"""Which process of a parallel run takes which tests, and in which order."""

from pathlib import PurePath

# Modules whose tests fork from one process that imports Bridge: `scripts.forked`.
FORKED = (
    "unit/test_expert_kernels",
    "unit/test_interpreted_activations",
    "unit/test_kernels",
    "unit/test_rmsnorm",
    "unit/test_rotary",
    "unit/test_segment_attention",
    "unit/test_tower_attention",
    "seams/test_contract",
    "seams/test_data_workers",
    "seams/test_layer_kernels",
    "seams/test_rebuilt_configs",
    "seams/test_setting_told",
)
# Those that take longest come first, so that no process waits for another at the end.
LONGEST = (
    *FORKED,
    "unit/test_proof",
    "unit/test_changed_models",
    "unit/test_capture_faults",
    "unit/test_vision",
    "unit/test_encoders",
    "unit/test_processes",
    "unit/test_growing",
    "unit/test_benchmarks",
    "unit/test_packed_hybrid",
    "unit/test_packed",
    "unit/test_packed_parts",
    "unit/test_packed_experts",
    "unit/test_watchdog",
    "unit/test_stages",
    "unit/test_packed_ranks",
    "unit/test_ranks",
    "unit/test_compare",
    "unit/test_rank_training",
    "unit/test_audit",
    "unit/test_batch_forms",
    "seams/test_deepstack_gradients",
    "seams/test_recipes",
    "seams/test_features",
    "seams/test_small_recipe",
    "seams/test_full_iteration",
)


def module_of(path: PurePath) -> str:
    """Return the name of a test module, with its folder's."""
    return f"{path.parent.name}/{path.stem}"


def turn_of(path: PurePath) -> int:
    """Return when a module's tests come."""
    module = module_of(path)
    return LONGEST.index(module) if module in LONGEST else len(LONGEST)


def scope_of(nodeid: str) -> str:
    """Return what the tests have in common that one process takes: their module, or what they fork from."""
    module = module_of(PurePath(nodeid.partition("::")[0]))
    return "forked" if module in FORKED else module
