"""Whether training would start: Bridge's own checks and the plugin's, run beside stand-ins for what Bridge imports."""

import contextlib
import functools
import importlib
import re
from collections.abc import Callable, Container, Iterator
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

from ..checks import check_bridge, fewest_gpus
from . import recipes

# What only a user's machine has: Bridge asks whether it is there.
_PLACES = ("path", "path_to_cache")
# Of a model, that a message gives.
_NUMBERS = re.compile(r"\d+")
# What a stand-in is in words.
_STANDS_IN = "<class 'abc."
_SOURCES = SourceReader()


def check_training(
    recipe: str, shipped: Any, config: Any, options: GraphOptions, gpus: int | None, gpu: str | None
) -> None:
    """Refuse what training refuses before it builds a model.

    Args:
        recipe: The recipe's name.
        shipped: Its configuration as it comes, where stand-ins alone are what upstream's model refuses.
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
        said: list[str] = []
        ready = functools.partial(_ready, said.append)
        training_config.refused_start(shipped, gpus or fewest_gpus(shipped.model), ready)
        refuse = functools.partial(_refuse_new, {_NUMBERS.sub("", message) for message in said})
        check_bridge(recipe, config, options, gpus, functools.partial(_ready, refuse))


def _refuse_new(known: Container[str], message: str) -> None:
    if _NUMBERS.sub("", message) not in known and _STANDS_IN not in message:
        raise ValueError(message)


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
    state, why = compare(seam, _SOURCES, bridge_release())
    return why if state == "broken" else ""


def _properties(gpu: str | None) -> SimpleNamespace:
    """Return what Bridge asks of a GPU.

    Raises:
        RuntimeError: Nobody said which.
    """
    if gpu is None:
        raise RuntimeError("which GPU is not known")
    return SimpleNamespace(name=f"NVIDIA {gpu.upper()}", major=10 if gpu.startswith("b") else 9, minor=0)


def _ready(refuse: Callable[[str], None], config: Any) -> None:
    """Let Bridge's checks run through: past files of a user's machine, and sizes and modules that are not here.

    Args:
        refuse: Called with what the model's own check says.
        config: What is checked.
    """
    config.model.bias_activation_fusion = False  # depends on a function of PyTorch's
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
                    told = refuse if section is config.model else lambda message: None
                    setattr(section, name, _forgiving(getattr(section, name), told))


def _forgiving(check: Callable[..., Any], refuse: Callable[[str], None]) -> Callable[..., None]:
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            check(*args, **kwargs)
        except (AssertionError, ValueError) as error:
            refuse(str(error))
        except Exception:
            return

    return run
