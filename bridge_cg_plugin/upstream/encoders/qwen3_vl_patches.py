"""Patches of Bridge's Qwen3-VL vision model: it never pads, and its config has graphs on."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

from ...options import PROVIDER_FIELDS, vision_options
from ..seams.patches import Patch
from ..seams.registry import seam

PADDING_SWITCH = seam("vision_padding_switch").target.rpartition(".")[2]
_ONE_THREAD = Lock()


def _never_pads(old: Callable[..., Any]) -> Callable[..., Any]:
    """Upstream's own padding and masking for graphs drops the attention boundaries: forward never takes that path."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _not_padding(self):
            return old(self, *args, **kwargs)

    return forward


class _No:
    """Answers the model's question whether to pad, for all its passes that are under way in some thread."""

    passes = 0

    def __call__(self) -> bool:
        return False


@contextmanager
def _not_padding(model: Any) -> Iterator[None]:
    with _ONE_THREAD:
        no = vars(model).setdefault(PADDING_SWITCH, _No())
        no.passes += 1
    try:
        yield
    finally:
        with _ONE_THREAD:
            no.passes -= 1
            if not no.passes:
                del vars(model)[PADDING_SWITCH]


def _may_pad(old: Callable[..., Any]) -> bool:
    """Whether a forward may pad; one that is not upstream's own may call it."""
    calls_switch = PADDING_SWITCH in getattr(getattr(old, "__code__", None), "co_names", ())
    return calls_switch or getattr(old, "__module__", "") != seam("vision_padding").module


def _with_graph_implementation(old: Callable[..., Any]) -> Callable[..., Any]:
    def get_vision_model_config(hf_config: Any, megatron_config: Any = None) -> Any:
        config = old(hf_config, megatron_config)
        if getattr(megatron_config, PROVIDER_FIELDS["impl"], "none") != "none":
            options = vision_options(megatron_config, config.spatial_merge_size**2)
            config.cuda_graph_impl = options.impl
            config.cuda_graph_scope = _scopes(options.modules)
            config.max_vision_cuda_graph_seq_length = options.max_seq_length
        return config

    return get_vision_model_config


def _scopes(modules: Sequence[str]) -> list[Any]:
    from megatron.core.transformer.enums import CudaGraphScope

    return [CudaGraphScope[name] for name in modules]


def _carries_nothing(old: Callable[..., Any]) -> bool:
    return PROVIDER_FIELDS["impl"] not in getattr(getattr(old, "__code__", None), "co_consts", ())


PATCHES = (
    Patch(seam("vision_padding"), _never_pads, needed=_may_pad),
    Patch(seam("vision_config"), _with_graph_implementation, needed=_carries_nothing),
)
