"""Configurations that graphs cannot work with, refused before the model is built."""

import contextlib
import copy
import io
import os
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from ...announce import warn_once
from ...options import SCOPE_FIELD, Facts, GraphOptions, OptionError, check_options
from ...options.graph_options import SETTING, asks_for_packed_graphs
from ...options.language_model import IMPL, MODULES, SCOPE
from ...options.normalization import options_of, warn_of_options, without_idle_fields
from ...options.sources import Written
from ..environment import check_process
from ..seams.patches import DriftError, Patch, bridge_release, core_release
from ..seams.registry import seam
from ..seams.seam import RELEASES, Feature, is_known
from ..seams.states import FEATURES, Wish, broken_seams, lost_with, refusal
from .graph_fields import announce_parts, apply_environment, collect_for_start, set_graphs


def check_seams(wish: Wish, features: Collection[str] = FEATURES) -> None:
    """Refuse a configuration that asks for features whose seams are broken; log the other broken seams once.

    Args:
        wish: What the configuration asks for.
        features: Features to look at; seams of others are not.

    Raises:
        DriftError: Names the seams, the features, the release and what to do.
    """
    broken = {name: why for name, why in broken_seams().items() if not set(features).isdisjoint(seam(name).features)}
    reason = refusal(wish, broken, bridge_release(), (release.bridge for release in RELEASES))
    if reason:
        raise DriftError(reason)
    bridge, core = bridge_release(), core_release()
    known = is_known(bridge, core)
    if known and not broken:
        return
    without = "; ".join(f"seam {name} ({lost_with(seam(name))})" for name in sorted(broken)) or "nothing"
    where = "is" if known else "is not in the version table and was not tested. It is"
    warn_once(
        f"megatron-bridge {bridge} with megatron-core {core} {where} used as far as it fits. This run goes on without: "
        f"{without}. `bridge-cg audit` says what differs"
    )


def check_configuration(config: Any) -> None:
    """Check the graph options of a configuration, without looking at this process or at the installed release.

    Args:
        config: A Bridge `ConfigContainer`.

    Raises:
        OptionError: Training would refuse the configuration.
    """
    written = without_idle_fields(collect_for_start(config))
    options = options_of(written)
    if options.enabled or options.packed.enabled:
        check_options(options, _facts(written, options))


def check_training_config(config: Any) -> None:
    """Check a Bridge `ConfigContainer` for everything that graphs depend on.

    Graphs that upstream runs are left alone. The vision modules are set under the name that Bridge reads.

    Raises:
        OptionError: Something cannot work; nothing was built yet.
        DriftError: The graphs need a part of the plugin that does not fit this release.
    """
    apply_environment(config)
    if getattr(config.model, SETTING, None) is not None:  # the one setting is resolved to the fields it comes to
        set_graphs(config)
    written = without_idle_fields(collect_for_start(config))
    options = options_of(written)
    announce_parts(config.model, options)
    if not (options.enabled or options.packed.enabled):
        if options.vision.deepstack_gradient_allreduce:
            check_seams(Wish(options, written.facts), (Feature.DEEPSTACK_GRADIENTS,))
        return
    if options.vision.enabled:
        check_process()
    facts = _facts(written, options)
    check_seams(Wish(options, facts))
    check_options(options, facts)
    warn_of_options(options)
    if options.vision.enabled:
        setattr(config.model, SCOPE_FIELD, list(options.vision.scope))


def _facts(written: Written, options: GraphOptions) -> Facts:
    facts = written.facts
    providers = {base.__name__ for base in type(written.model).__mro__}
    if options.vision.enabled or "GPTModelProvider" in providers:
        return facts
    # Bridge insists on Transformer Engine's tracker for GPT models only.
    return facts.but(te_rng_tracker=None, use_te_rng_tracker=None)


def _checked(old: Callable[..., None]) -> Callable[..., None]:
    def validate(self: Any, *args: Any, **kwargs: Any) -> None:
        from ..wrappers import overridden  # with PyTorch, which `bridge-cg explain` does without

        check_training_config(self)
        # megatron-core would take graphs of packs for its own, which keep what is to be recomputed.
        again = getattr(self.model, "recompute_granularity", None) == "full" and asks_for_packed_graphs(self.model)
        with contextlib.ExitStack() as stack:
            for name, value in {IMPL: "none", **_held(self.model, (MODULES, SCOPE))}.items() if again else ():
                stack.enter_context(overridden(self.model, name, value))
            return old(self, *args, **kwargs)

    return validate


def _held(model: Any, names: Collection[str]) -> dict[str, Any]:
    """Return the fields of these names that a model has: Bridge empties them where graphs are off."""
    return {name: value for name, value in vars(model).items() if name in names}


PATCHES = (Patch(seam("config_check"), _checked),)


# Other errors than these come from what a machine without GPUs lacks.
_REFUSALS = (ArithmeticError, AssertionError, TypeError, ValueError, DriftError)


def refused_start(config: Any, ranks: int, ready: Callable[[Any], None] = lambda tried: None) -> str:
    """Return why Bridge refuses to start with a configuration; empty where it does not, or not without GPUs.

    Args:
        config: A Bridge `ConfigContainer`. Whether its pretrained checkpoint exists is not looked at.
        ranks: How many processes train.
        ready: Called with the copy that is checked.

    Raises:
        OptionError: The plugin refuses it in this process.
    """
    from megatron.bridge.training.config import runtime_config_update

    tried = copy.deepcopy(config)
    if tried.checkpoint.pretrained_checkpoint is not None:
        tried.checkpoint.pretrained_checkpoint = os.sep
    # Bridge would ask a process group that this process may have for something else.
    tried.get_data_parallel_size = lambda _: config.get_data_parallel_size(ranks)
    ready(tried)
    try:
        with _unseen(), _restored({"WORLD_SIZE": str(ranks)}):
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
def _unseen() -> Iterator[None]:
    """Drop what Bridge prints and warns of: training prints it again."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _restored(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside; afterwards all are as before, and what Bridge's checks switch on in PyTorch."""
    import torch

    before, algorithms = dict(os.environ), torch.are_deterministic_algorithms_enabled()
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        torch.use_deterministic_algorithms(algorithms)
