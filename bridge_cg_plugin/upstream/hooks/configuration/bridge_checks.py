"""What Bridge refuses of a configuration, found without a GPU, a network or process groups. Nothing is changed."""

import contextlib
import copy
import io
import os
import traceback
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from ....options import OptionError
from ...seams.patches import DriftError

# Other errors than these come from what a machine without GPUs lacks.
_REFUSALS = (ArithmeticError, AssertionError, TypeError, ValueError, DriftError)


def precisions() -> list[str]:
    """Return the names that Bridge has for mixed precision; each may be written with hyphens, too."""
    from megatron.bridge.training.mixed_precision import MIXED_PRECISION_RECIPES

    return sorted({name.replace("-", "_") for name in MIXED_PRECISION_RECIPES})


def refused_schedule(config: Any) -> str:
    """Return why Bridge refuses the sections of training and its scheduler; empty where it does not.

    Looks at nothing else, so the rest of the configuration may be stand-ins.

    Args:
        config: A Bridge `ConfigContainer`.
    """
    tried = copy.copy(config)
    try:
        with _unseen():
            tried.train, tried.scheduler = copy.deepcopy((config.train, config.scheduler))
            tried.train.finalize()
            tried.scheduler.finalize()
            tried._validate_training_scheduler_compatibility()
            if tried.train.train_iters is not None:
                tried._calculate_scheduler_steps()
    except (AssertionError, ValueError) as error:
        return str(error)
    except (AttributeError, TypeError):  # a stand-in, or a release that lacks one of these
        return ""
    return ""


def refused_start(config: Any, ranks: int) -> str:
    """Return why Bridge refuses to start with a configuration; empty where it does not, or not without GPUs.

    Args:
        config: A Bridge `ConfigContainer`. Whether its pretrained checkpoint exists is not looked at.
        ranks: How many processes train.

    Raises:
        OptionError: The plugin refuses it in this process.
    """
    from megatron.bridge.training.config import runtime_config_update

    tried = copy.deepcopy(config)
    if tried.checkpoint.pretrained_checkpoint is not None:
        tried.checkpoint.pretrained_checkpoint = os.sep
    # Bridge would ask a process group that this process may have for something else.
    tried.get_data_parallel_size = lambda _: config.get_data_parallel_size(ranks)
    try:
        with _unseen(), _restored(), environment({"WORLD_SIZE": str(ranks)}):
            runtime_config_update(tried)
    except OptionError:
        raise
    except _REFUSALS as error:
        return _reason(error)
    except Exception:
        return ""
    return ""


def _reason(error: Exception) -> str:
    """Return an error's message; with its kind, and the line where it has none, unless it was written for a person."""
    if str(error) and isinstance(error, AssertionError | ValueError | DriftError):
        return str(error)
    return f"{type(error).__name__}: {str(error) or traceback.extract_tb(error.__traceback__)[-1].line}"


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside a `with` block; afterwards all are as before."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """Drop what Bridge prints and warns of: training prints it again."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    """Undo what Bridge's checks switch on in PyTorch."""
    import torch

    before = torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
