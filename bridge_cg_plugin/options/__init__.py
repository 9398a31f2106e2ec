"""The options users set: types, normalization of every spelling, checks, and what a release makes of them."""

from typing import Any

from .combinations import check_combinations, check_options
from .errors import GraphOptionWarning, OptionError
from .facts import Facts, facts_of
from .graph_options import GraphOptions
from .language_model import (
    CudaGraphModule,
    InferenceCudaGraphScope,
    LanguageModelGraphOptions,
    normalize_cuda_graph_modules,
    normalize_inference_cuda_graph_scope,
)
from .migration import ENUM, MIGRATIONS, check_deprecated_scope
from .normalization import as_fields, graph_options, normalize
from .offload import OFFLOAD_FIELDS, OFFLOAD_MODULES, RECOMPUTE, CapturedOptions, OffloadOptions
from .packed import PACKED_FIELDS, PackedOptions, packed_options
from .vision import (
    PROVIDER_FIELDS,
    SCOPE_FIELD,
    VisionGraphOptions,
    audio_options,
    vision_options,
)

__all__ = [
    "MIGRATIONS",
    "OFFLOAD_FIELDS",
    "OFFLOAD_MODULES",
    "PACKED_FIELDS",
    "PROVIDER_FIELDS",
    "RECOMPUTE",
    "SCOPE_FIELD",
    "CapturedOptions",
    "CudaGraphModule",
    "Facts",
    "GraphOptionWarning",
    "GraphOptions",
    "InferenceCudaGraphScope",
    "LanguageModelGraphOptions",
    "OffloadOptions",
    "OptionError",
    "PackedOptions",
    "VisionGraphOptions",
    "as_fields",
    "check_combinations",
    "check_deprecated_scope",
    "check_options",
    "facts_of",
    "graph_options",
    "normalize",
    "normalize_cuda_graph_modules",
    "normalize_inference_cuda_graph_scope",
    "packed_options",
    "audio_options",
    "vision_options",
]


def __getattr__(name: str) -> Any:
    if name == "CudaGraphScope":
        import warnings

        warnings.warn(ENUM.warning, GraphOptionWarning, stacklevel=2)
        return CudaGraphModule
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
