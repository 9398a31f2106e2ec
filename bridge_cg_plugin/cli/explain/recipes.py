"""Bridge's recipes without what they import: PyTorch, Transformers and most of Megatron are stand-ins.

Importing Bridge takes 20 s. Its recipes and configuration classes are plain Python, so they are imported as they are;
every other module has attributes that accept any use and do nothing. A process with stand-ins cannot train.
"""

import abc
import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import io
import json
import logging
import re
import sys
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import bridge_cg_plugin
from bridge_cg_plugin.cli.answers import Tell
from bridge_cg_plugin.options import GraphOptions, OptionError
from bridge_cg_plugin.options.sources import FIELDS, OTHER_FIELDS, SETTINGS
from bridge_cg_plugin.recipes import RECIPES
from bridge_cg_plugin.upstream.hooks.overrides import resolve
from bridge_cg_plugin.upstream.hooks.recipes import PACKAGES, build_recipe, letters, recipe_names
from bridge_cg_plugin.upstream.seams.activation import patch_other_providers
from bridge_cg_plugin.upstream.seams.seam import minor

from . import models

MEGATRON = "megatron"
# Packages besides Python's that are imported as they are.
LIGHT = sys.stdlib_module_names | {
    *("bridge_cg_plugin", "omegaconf", "hydra", "antlr4", "yaml", "wrapt", "packaging", "typing_extensions"),
    *("attr", "attrs", "rich", "pygments", "markdown_it", "mdurl"),
}
# Modules of Megatron that hold what recipes are made of, by the last part of their names.
_PARTS = frozenset(
    {
        *("base", "common_utils", "comm_overlap", "cuda_graph", "direct_hf_sft", "dora", "energon", "enums"),
        *("flex_dispatcher_backend", "fusions", "gpt_dataset", "gpt_sft", "hf", "import_utils", "lora"),
        *("mixed_precision", "mock_vlm_sft", "omegaconf_utils", "slurm_utils", "vocab_utils"),
    }
)


# What is read of a configuration: a stand-in has what was given to it.
_OPTIONS = frozenset((*FIELDS, *SETTINGS, *OTHER_FIELDS, "enable_offline_packing", "offline_packing_specs"))
# What Bridge asks for the version of, in functions such as is_te_min_version.
_VERSIONED = {"te": "transformer-engine", "torch": "torch"}


class _AnyClass(abc.ABCMeta):
    """The class of stand-ins: classes that can be called, derived from, subscripted and asked for any attribute.

    Graph options, and what they depend on, are the exception: no stand-in has any by itself.
    """

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") or name in _OPTIONS:
            raise AttributeError(name)
        found = stand_in(name)
        type.__setattr__(cls, name, found)
        return found

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if not cls.__dict__.get("_stands_in"):
            return super().__call__(*args, **kwargs)
        decorated = len(args) == 1 and not kwargs and isinstance(args[0], FunctionType | type)
        return args[0] if decorated else stand_in(f"{cls.__name__}()", kwargs)

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __len__(cls) -> int:
        return 0

    def __bool__(cls) -> bool:
        return False


def stand_in(name: str, attributes: Mapping[str, Any] | None = None) -> Any:
    """Return a stand-in for a class, function or value, with what is known of its attributes."""

    def ignore(*args: Any, **kwargs: Any) -> None:
        pass

    own = {"_stands_in": True, "__init__": ignore, "__init_subclass__": classmethod(ignore)}
    return _AnyClass(name, (), {**(attributes or {}), **own})


class StandIn(ModuleType):
    """A module of which nothing is executed. A package's names are looked up where its `__init__` takes them from."""

    __stand_in__ = True
    _origins: dict[str, tuple[str, str]] | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            try:
                return importlib.metadata.version(self.__name__.partition(".")[0])
            except importlib.metadata.PackageNotFoundError:
                return "0"
        if name.startswith("__"):
            raise AttributeError(name)
        if asked := re.fullmatch(r"is_(\w+)_min_version", name):
            return partial(_is_at_least, _VERSIONED.get(asked[1], asked[1]))
        if self._origins is None:
            self._origins = _origins(self)
        module, attribute = self._origins.get(name, ("", ""))
        if module == self.__name__:
            found: Any = importlib.import_module(f"{module}.{name}")
        else:
            found = getattr(importlib.import_module(module), attribute) if module else stand_in(name)
        setattr(self, name, found)
        return found


def _is_at_least(package: str, least: str, *args: Any, **kwargs: Any) -> bool:
    try:
        return minor(importlib.metadata.version(package)) >= minor(least)
    except importlib.metadata.PackageNotFoundError:
        return False


def _origins(package: ModuleType) -> dict[str, tuple[str, str]]:
    """Return the modules and names that a package of Megatron takes its names from."""
    found: dict[str, tuple[str, str]] = {}
    for path in getattr(package, "__path__", ()) if package.__name__.startswith(MEGATRON) else ():
        file = Path(path) / "__init__.py"
        for node in ast.walk(ast.parse(file.read_text())) if file.is_file() else ():
            if isinstance(node, ast.ImportFrom):
                written = "." * node.level + (node.module or "")
                module = importlib.util.resolve_name(written, package.__name__)
                found.update({alias.asname or alias.name: (module, alias.name) for alias in node.names})
    return found


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins for all modules but light ones; each is complete as it is created."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the specification of a stand-in; None for a module that is imported as it is."""
        top = name.partition(".")[0]
        if top in LIGHT or name == MEGATRON:
            return None
        folders = None
        if top == MEGATRON:
            found = importlib.machinery.PathFinder.find_spec(name, path)
            if found is None or found.loader is None or _as_it_is(name):
                return None
            folders = found.submodule_search_locations
        spec = importlib.machinery.ModuleSpec(name, self, is_package=folders is not None or top != MEGATRON)
        if folders is not None:
            spec.submodule_search_locations = list(folders)
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return the stand-in."""
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Execute nothing."""


def _as_it_is(name: str) -> bool:
    last = name.rpartition(".")[2]
    return (
        name.startswith(PACKAGES)
        or name == "megatron.core.datasets.utils"
        or "config" in last
        or last.endswith("provider")
        or last in _PARTS
    )


def installed() -> bool:
    """Return whether there are stand-ins in this process."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def install() -> None:
    """Put stand-ins in the place of what this process has not imported yet. There is no way back."""
    if not installed():
        sys.meta_path.insert(0, _Finder())


def set_words(config: Any, words: Sequence[str]) -> None:
    """Set fields of a Bridge `ConfigContainer` that Hydra cannot hold, since some of its values are stand-ins.

    Args:
        config: The configuration.
        words: `section.name=value`, whose names exist as far as classes say; `~section.name` removes a value. Values
            with interpolations are left out.

    Raises:
        OptionError: A value does not parse, or a section has no fields.
    """
    import yaml

    for word in words:
        name, _, value = word.lstrip("+~").partition("=")
        *path, field = name.split(".")
        owner = config
        for part in path:
            owner = owner.get(part) if isinstance(owner, dict) else getattr(owner, part, None)
        if owner is None:
            empty = f"left out while {'.'.join(path)} is empty"
            raise OptionError(name, value, empty, "The recipe has no such section.")
        if "${" in value:
            continue
        try:
            parsed = None if word.startswith("~") else yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise OptionError.because(name, f"Cannot use {name}={value}: it does not parse. {error}.") from None
        if isinstance(owner, dict):
            owner[field] = parsed
        else:
            setattr(owner, field, parsed)


def require_bridge(recipe: str, otherwise: str = "") -> None:
    """Refuse a recipe where Bridge is not installed.

    Raises:
        OptionError: Says what to install.
    """
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.bridge") is None:
        why = f"megatron-bridge is not installed. Install it: pip install 'bridge-cg-plugin[stack]'{otherwise}."
        raise OptionError.because("recipe", f"Cannot build recipe {recipe}: {why}")


def without_imports() -> None:
    """Switch the plugin on, with stand-ins in the place of Bridge's imports; beside PyTorch all is as it is."""
    bridge_cg_plugin.activate()
    if "torch" in sys.modules and not installed():
        return
    logging.disable(logging.ERROR)
    install()
    patch_other_providers()  # what stands in for Bridge's models is never imported
    models.replace_auto_bridge()


def built(name: str) -> Any:
    """Return a recipe's configuration.

    Raises:
        OptionError: There is no such recipe, or it cannot be built.
    """
    try:
        return build_recipe(name)
    except OptionError as error:
        if error.__cause__ is None or not installed():
            raise
        advice = "bridge-cg train --dry-run imports Bridge and builds it as training does."
        raise OptionError.because("recipe", f"{error} It was read without Bridge's imports. {advice}") from error


def resolved(config: Any, flags: Mapping[str, Any] | None = None, words: Sequence[str] = ()) -> GraphOptions:
    """Return the graph options of a configuration, with flags and words applied to it.

    Args:
        config: A Bridge `ConfigContainer`.
        flags: Fields of the model and what was written.
        words: Hydra-style `section.name=value`.

    Raises:
        OptionError: Training would refuse the result.
    """
    with redirect_stdout(io.StringIO()):  # training would print there what the answer has
        return resolve(config, flags or {}, words, set_words if installed() else None)


# Benchmarks are for a number of GPUs; families end before a size or a kind of training.
_BENCHMARK = re.compile(r"_\d+gpu_")
_FAMILY = re.compile(r"_(?=\d|sft|peft|pretrain|small|a\d|e\d|super|ultra|nano|flash|v\d|lite|cord|valor).*")


def run(args: Namespace, tell: Tell) -> int:
    """Print the recipes whose names contain a text, in any case and with any separators, or how many each family has.

    Returns the exit status.
    """
    part, benchmarks = args.filter, args.all
    every = (recipes_of_bridge(), recipe_names() & RECIPES.keys())
    others, presets = (sorted(name for name in names if letters(part) in letters(name)) for names in every)
    if not presets and not others:
        remedy = "Write another part of it; bridge-cg recipes lists all."
        raise OptionError.because("recipe", f"Cannot find a recipe with {part!r} in its name. {remedy}")
    if args.json:
        tell(json.dumps({"presets": presets, "recipes": others}))
        return 0
    listed = [name for name in others if benchmarks or not _BENCHMARK.search(name)]
    if not part and not benchmarks:
        families = Counter(_FAMILY.sub("", name) for name in listed)
        listed = [f"{family} ({count})" for family, count in families.items()]
    for title, names in (("presets with graphs", presets), ("recipes of Megatron-Bridge", listed)):
        tell("\n".join([title, *(f"  {name}" for name in names or ["none"])]))
    if not part and not benchmarks:
        tell("bridge-cg recipes FAMILY lists one; --all also benchmarks for numbers of GPUs")
    return 0


def recipes_of_bridge() -> set[str]:
    """Return the names of the installed Bridge's recipes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        without_imports()
        return recipe_names() - set(RECIPES)
