"""Options of language-model graphs: the types, and the normalization that config objects and command lines share."""

import enum
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from .declaration import Group, option
from .errors import OptionError
from .values import Parser, is_unset, one_of, parse_choice, word, words

Implementation = Literal["none", "local", "transformer_engine", "full_iteration"]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)


class CudaGraphModule(enum.Enum):
    """A part of a layer that is captured as a graph of its own; no parts means the whole layer."""

    attn = 1
    mlp = 2
    moe = 3
    moe_router = 4
    moe_preprocess = 5
    mamba = 6


class InferenceCudaGraphScope(enum.Enum):
    """Who owns inference graphs: nobody, every layer, or the block of layers."""

    none = 1
    layer = 2
    block = 3


# The first is what an implementation takes when nothing is chosen.
INFERENCE_SCOPES: dict[Implementation, tuple[InferenceCudaGraphScope, ...]] = {
    "none": (InferenceCudaGraphScope.none,),
    "local": (InferenceCudaGraphScope.layer, InferenceCudaGraphScope.block),
    "transformer_engine": (InferenceCudaGraphScope.none,),
    "full_iteration": (InferenceCudaGraphScope.none,),
}

IMPL, MODULES, SCOPE, INFERENCE = (
    "cuda_graph_impl",
    "cuda_graph_modules",
    "cuda_graph_scope",
    "inference_cuda_graph_scope",
)
MODULE_NAMES = tuple(module.name for module in CudaGraphModule)
DEPRECATED_MODULES = ("full_iteration", "full_iteration_inference")
_MODULES_ALLOWED = f"any of {', '.join(MODULE_NAMES)}, or empty for the whole layer"
_SCOPE_NAMES = tuple(scope.name for scope in InferenceCudaGraphScope)


class NormalizedModules(NamedTuple):
    """A parsed list of modules.

    Attributes:
        modules: The modules, typed, each once.
        deprecated: Words of the old scope that were among them and mean something else.
        full: Whether the old word "full" was used for the whole layer.
    """

    modules: tuple[CudaGraphModule, ...]
    deprecated: tuple[str, ...]
    full: bool


def normalize_cuda_graph_modules(value: Any, field: str = MODULES) -> NormalizedModules:
    """Return modules, typed, from any spelling: None, strings, comma-separated or bracketed, enums, lists.

    Raises:
        OptionError: An entry is no module, or "full" is combined with others.
    """
    names = words(value)
    if "full" in names:
        if names != ("full",):
            raise OptionError(
                field, value, '"full" alone', "Write the modules without it, or an empty list for the whole layer."
            )
        return NormalizedModules((), (), True)
    for name in names:
        if name not in MODULE_NAMES + DEPRECATED_MODULES:
            raise OptionError(field, value, _MODULES_ALLOWED, _remedy(name))
    modules = tuple(CudaGraphModule[name] for name in names if name in MODULE_NAMES)
    return NormalizedModules(modules, tuple(name for name in names if name in DEPRECATED_MODULES), False)


def _remedy(name: str) -> str:
    if name == "none":
        return f"Set {IMPL}=none for no graphs: an empty list of modules means the whole layer."
    return f"Remove {name!r}."


def normalize_implementation(value: Any) -> Implementation:
    """Return the typed value of `cuda_graph_impl`.

    Raises:
        OptionError: There is no such implementation.
    """
    return parse_choice(IMPL, value, IMPLEMENTATIONS)


def normalize_inference_cuda_graph_scope(value: Any, impl: Implementation) -> InferenceCudaGraphScope:
    """Return the inference scope, typed; where none is chosen, the default of the implementation.

    Raises:
        OptionError: There is no such scope.
    """
    if is_unset(value):
        return INFERENCE_SCOPES[impl][0]
    parse_choice(INFERENCE, value, _SCOPE_NAMES)
    return InferenceCudaGraphScope[word(value)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModelGraphOptions:
    """Language-model CUDA graphs, typed. What each option means is in its declaration.

    Raises:
        OptionError: A value is not of its type.
    """

    impl: Implementation = option(
        "none",
        one_of(IMPLEMENTATIONS),
        "IMPL",
        "language-model graphs: none, local, transformer_engine or full_iteration",
        "`local`: per-layer graphs by megatron-core. `transformer_engine`: per-layer graphs by Transformer Engine. "
        "`full_iteration`: one graph of the whole step; on a model that takes images, of the whole language model",
        field=IMPL,
        since="0.5",
    )
    modules: tuple[CudaGraphModule, ...] = option(
        (),
        Parser(_MODULES_ALLOWED, lambda field, value: normalize_cuda_graph_modules(value, field).modules),
        "LIST",
        f"parts of a layer to capture: {', '.join(MODULE_NAMES)}; [] is the whole layer",
        "With `cuda_graph_impl=local`, `moe_router` and `moe_preprocess` are captured together",
        field=MODULES,
        old=(SCOPE, f"deprecated: write --{MODULES}, or --{IMPL} full_iteration"),
        since="0.5",
    )
    inference_scope: InferenceCudaGraphScope = option(
        InferenceCudaGraphScope.none,
        Parser(" or ".join(_SCOPE_NAMES), lambda field, value: normalize_inference_cuda_graph_scope(value, "none")),
        "SCOPE",
        "inference graphs: none, layer or block",
        "The default depends on `cuda_graph_impl`",
        field=INFERENCE,
        since="0.5",
    )

    def __post_init__(self) -> None:
        if self.impl not in IMPLEMENTATIONS:
            raise OptionError(IMPL, self.impl, " or ".join(IMPLEMENTATIONS), "Use graph_options() to parse it.")
        if not isinstance(self.modules, tuple) or not all(isinstance(m, CudaGraphModule) for m in self.modules):
            raise OptionError(MODULES, self.modules, "a tuple of CudaGraphModule", "Use graph_options() to parse it.")
        if not isinstance(self.inference_scope, InferenceCudaGraphScope):
            raise OptionError(
                INFERENCE, self.inference_scope, "an InferenceCudaGraphScope", "Use graph_options() to parse it."
            )

    @property
    def enabled(self) -> bool:
        """Whether language-model graphs are asked for."""
        return self.impl != "none"

    @property
    def per_layer(self) -> bool:
        """Whether layers, or parts of them, are graphs of their own."""
        return self.impl in ("local", "transformer_engine")

    def captures(self, module: CudaGraphModule) -> bool:
        """Whether per-layer graphs contain this part of a layer."""
        return self.per_layer and (not self.modules or module in self.modules)


LANGUAGE_MODEL = Group(name="language_model", kind=LanguageModelGraphOptions)


def complete_modules(impl: Implementation, modules: tuple[CudaGraphModule, ...]) -> tuple[CudaGraphModule, ...]:
    """Return what megatron-core captures for these modules: impl local takes router and preprocessing as one."""
    pair = (CudaGraphModule.moe_router, CudaGraphModule.moe_preprocess)
    if impl != "local" or not any(module in modules for module in pair):
        return modules
    return (*modules, *(module for module in pair if module not in modules))
