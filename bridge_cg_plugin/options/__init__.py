"""The options users set: types, every spelling of their values, checks, and what a release makes of them."""

import warnings
from typing import Any

from .combinations import check_options
from .declaration import GraphOptionWarning, OptionError
from .facts import Facts
from .graph_options import GraphOptions
from .language_model import (
    CudaGraphModule,
    InferenceCudaGraphScope,
    LanguageModelGraphOptions,
    check_deprecated_scope,
    deprecation,
    normalize_cuda_graph_modules,
    normalize_inference_cuda_graph_scope,
)
from .normalization import as_fields, graph_options, normalize
from .packed import PACKED_FIELDS, PackedOptions
from .vision import OFFLOAD_MODULES, PROVIDER_FIELDS, SCOPE_FIELD, VisionGraphOptions, vision_options

__all__ = [
    "OFFLOAD_MODULES",
    "PACKED_FIELDS",
    "PROVIDER_FIELDS",
    "SCOPE_FIELD",
    "CudaGraphModule",
    "Facts",
    "GraphOptionWarning",
    "GraphOptions",
    "InferenceCudaGraphScope",
    "LanguageModelGraphOptions",
    "OptionError",
    "PackedOptions",
    "VisionGraphOptions",
    "as_fields",
    "check_deprecated_scope",
    "check_options",
    "graph_options",
    "normalize",
    "normalize_cuda_graph_modules",
    "normalize_inference_cuda_graph_scope",
    "vision_options",
]


def __getattr__(name: str) -> Any:
    if name == "CudaGraphScope":
        warnings.warn(deprecation("the enum CudaGraphScope", "CudaGraphModule"), GraphOptionWarning, stacklevel=2)
        return CudaGraphModule
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
