"""Graph flags in upstream's scripts/performance, launched as they are."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ....options import vision_options
from ....options.flags import add_flags, clear_flags, given_flags, take_flags
from ....options.language_model import IMPL, SCOPE
from ....options.sources import Written, collect
from ...seams.patches import Patch
from ...seams.registry import seam
from .overrides import apply_flags, apply_to_bridges, resolved_words, written_by_bridge

# What upstream's modules of these names define, and others do not.
DEFINED = {
    "argument_parser": "VALID_CUDA_GRAPH_SCOPES",
    "utils.overrides": "set_workload_base_configs",
    "utils.utils": "WorkloadBaseConfig",
}
# Graph options among a configuration's Hydra words, until its parsed arguments come, by the configuration's id: what
# the words set, and the flags between them.
_words: dict[int, tuple[Written, dict[str, Any]]] = {}


@dataclass(slots=True)
class ScriptPatch(Patch):
    """A patch of a module that has no package of its own: another module of the same name is left alone."""

    def apply(self, module: ModuleType) -> None:
        """Replace the attribute if the module is upstream's."""
        if hasattr(module, DEFINED[self.module]):
            Patch.apply(self, module)
        else:
            self.state, self.reason = "native", "another module of this name"


def _with_flags(old: Callable[[], Any]) -> Callable[[], Any]:
    def parse_cli_args() -> Any:
        parser = old()
        add_flags(parser, replace=True)
        return parser

    return parse_cli_args


def _keeping_tracker(old: Callable[..., Any]) -> Callable[..., Any]:
    def set_cuda_graph_overrides(recipe: Any, *args: Any, **kwargs: Any) -> Any:
        found = old(recipe, *args, **kwargs)
        if vision_options(recipe.model).enabled:
            recipe.rng.te_rng_tracker = recipe.model.use_te_rng_tracker = True
        return found

    return set_cuda_graph_overrides


def _after_words(old: Callable[..., Any]) -> Callable[..., Any]:
    def set_cli_overrides(recipe: Any, cli_overrides: list[str]) -> Any:
        flags, rest = take_flags(cli_overrides or [])
        recipe = old(recipe, rest)
        written = resolved_words(recipe, rest)
        if flags or written.fields:
            _words[id(recipe)] = written, flags
        return recipe

    return set_cli_overrides


def _with_graphs(old: Callable[..., Any]) -> Callable[..., Any]:
    """Graph options come first: what upstream does next depends on them."""

    def set_user_overrides(recipe: Any, args: Any) -> Any:
        written, flags = _words.pop(id(recipe), (Written(), {}))
        flags = {**flags, **given_flags(args)}
        if flags:
            apply_flags(recipe, written, flags)
        return old(recipe, clear_flags(args, (IMPL, SCOPE)))

    return set_user_overrides


def _with_graphs_of_recipes(old: Callable[..., Any]) -> Callable[..., Any]:
    def apply_argparse_overrides(config: Any, args: Any) -> Any:
        config = old(config, args)
        flags = given_flags(args)
        if flags:
            apply_flags(config, flags)
        return config

    return apply_argparse_overrides


def _without_flags(old: Callable[..., Any]) -> Callable[..., Any]:
    def process_config_with_overrides(
        config: Any, config_filepath: Any = None, cli_overrides: list[str] | None = None
    ) -> Any:
        flags, rest = take_flags(cli_overrides or [])
        before = collect(config)
        config = old(config, config_filepath, rest or None)
        apply_to_bridges(config, before, written_by_bridge(config, config_filepath, rest), flags)
        return config

    return process_config_with_overrides


PATCHES = (
    ScriptPatch(seam("performance_parser"), _with_flags),
    ScriptPatch(seam("performance_overrides"), _keeping_tracker),
    ScriptPatch(seam("performance_user_overrides"), _with_graphs),
    ScriptPatch(seam("performance_words"), _after_words),
    ScriptPatch(seam("performance_recipes"), _with_graphs_of_recipes),
    Patch(seam("hydra_words"), _without_flags),
)
