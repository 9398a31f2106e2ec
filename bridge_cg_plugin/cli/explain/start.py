"""Whether training would start: Bridge's own checks and the plugin's, run beside stand-ins for what Bridge imports."""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from bridge_cg_plugin.options import GraphOptions
from bridge_cg_plugin.options.normalization import normalize
from bridge_cg_plugin.upstream.hooks import training_config
from bridge_cg_plugin.upstream.hooks.graph_fields import collect_for_start
from bridge_cg_plugin.upstream.seams.patches import bridge_release
from bridge_cg_plugin.upstream.seams.registry import SEAMS
from bridge_cg_plugin.upstream.seams.seam import Seam
from bridge_cg_plugin.upstream.seams.source_reader import SourceReader
from bridge_cg_plugin.upstream.seams.states import Wish, compare, needs

from ..checks import check_bridge
from . import recipes

# What only a user's machine has: Bridge asks whether it is there.
_PLACES = ("path", "path_to_cache")


def check_training(recipe: str, config: Any, options: GraphOptions, gpus: int | None, gpu: str | None) -> None:
    """Refuse what training refuses before it builds a model.

    Args:
        recipe: The recipe's name.
        config: A Bridge `ConfigContainer`, with everything applied.
        options: Its graph options.
        gpus: How many GPUs there are; None takes one replica's.
        gpu: Which, a key of `recipes.GPUS`; None is not known.

    Raises:
        OptionError: Training would refuse it.
    """
    if not recipes.installed():
        return check_bridge(recipe, config, options, gpus)
    with _beside_stand_ins(config, gpu):
        check_bridge(recipe, config, options, gpus, _ready)


@contextlib.contextmanager
def _beside_stand_ins(config: Any, gpu: str | None) -> Iterator[None]:
    """Compare seams with upstream's sources, as patches of stand-ins tell nothing, and let PyTorch see a GPU."""
    options, written = normalize(collect_for_start(config))
    wish = Wish(options, written.facts)
    broken = {seam.name: why for seam in SEAMS if needs(wish, seam) and (why := _drift(seam))}
    cuda: Any = importlib.import_module("torch.cuda")
    held = training_config.broken_seams, cuda.get_device_properties
    training_config.broken_seams, cuda.get_device_properties = lambda: broken, lambda *_: _properties(gpu)
    try:
        yield
    finally:
        training_config.broken_seams, cuda.get_device_properties = held


@functools.cache
def _drift(seam: Seam) -> str:
    state, why = compare(seam, _reader(), bridge_release())
    return why if state == "broken" else ""


@functools.cache
def _reader() -> SourceReader:
    return SourceReader()


def _properties(gpu: str | None) -> SimpleNamespace:
    """Return what Bridge asks of a GPU.

    Raises:
        RuntimeError: Nobody said which.
    """
    if gpu is None:
        raise RuntimeError("which GPU is not known")
    return SimpleNamespace(name=f"NVIDIA {gpu.upper()}", major=10 if gpu.startswith("b") else 9, minor=0)


def _ready(config: Any) -> None:
    """Let Bridge's checks run through: past files of a user's machine, and sizes and modules that are not here."""
    config.checkpoint.pretrained_checkpoint = config.checkpoint.pretrained_checkpoint or "/"
    for name in _PLACES:
        if hasattr(config.dataset, name) and not getattr(config.dataset, name):
            setattr(config.dataset, name, "/")
    if hasattr(config.model, "seq_length") and config.model.seq_length is None:
        config.model.seq_length = getattr(config.dataset, "seq_length", None)
    for section in vars(config).values():
        for name in ("finalize", "setup", "__post_init__"):
            if callable(getattr(type(section), name, None)) and not isinstance(section, type):
                with contextlib.suppress(AttributeError, TypeError):
                    setattr(section, name, _forgiving(getattr(section, name)))


def _forgiving(check: Callable[..., Any]) -> Callable[..., None]:
    def run(*args: Any, **kwargs: Any) -> None:
        with contextlib.suppress(Exception):
            check(*args, **kwargs)

    return run
