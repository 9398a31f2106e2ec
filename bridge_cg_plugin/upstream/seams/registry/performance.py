"""Seams of upstream's scripts/performance, which are in its repository only, and of the overrides that they use."""

from ..seam import Feature, patched

PARSER, OVERRIDES, UTILITIES = "argument_parser", "utils.overrides", "utils.utils"

SEAMS = (
    patched(
        "performance_parser",
        f"{PARSER}:parse_cli_args",
        "the performance scripts have the graph flags",
        Feature.PERFORMANCE,
        "hooks.configuration.performance_scripts",
        packaged=False,
    ),
    patched(
        "performance_overrides",
        f"{OVERRIDES}:_set_cuda_graph_overrides",
        "vision graphs keep their random-state tracker when the language model has no graphs",
        Feature.PERFORMANCE,
        "hooks.configuration.performance_scripts",
        takes="recipe cuda_graph_impl cuda_graph_scope",
        packaged=False,
    ),
    patched(
        "performance_user_overrides",
        f"{OVERRIDES}:set_user_overrides",
        "graph flags of the performance scripts reach the configuration",
        Feature.PERFORMANCE,
        "hooks.configuration.performance_scripts",
        takes="recipe args",
        packaged=False,
    ),
    patched(
        "performance_words",
        f"{OVERRIDES}:set_cli_overrides",
        "graph flags that the parser did not know, since it was imported before PyTorch, are no Hydra words",
        Feature.PERFORMANCE,
        "hooks.configuration.performance_scripts",
        takes="recipe cli_overrides",
        packaged=False,
    ),
    patched(
        "performance_recipes",
        f"{UTILITIES}:apply_argparse_overrides",
        "graph flags reach the configuration with --use_recipes too",
        Feature.PERFORMANCE,
        "hooks.configuration.performance_scripts",
        takes="config args",
        since="0.6.2",
        packaged=False,
    ),
    patched(
        "hydra_words",
        "megatron.bridge.training.utils.omegaconf_utils:process_config_with_overrides",
        "graph flags among Hydra words, from performance scripts with --use_recipes",
        Feature.PERFORMANCE,
        "hooks.configuration.performance_scripts",
        takes="config cli_overrides",
    ),
)
