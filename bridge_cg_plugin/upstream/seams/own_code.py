"""Whether upstream's functions are those that were shipped (see `contract`), and what it may change while it trains."""

import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

from torch.nn import functional

from ...graphs.changes.state import Exempt, look_not_into
from ...graphs.errors import Refused
from ...graphs.fallback import Fallback
from ...graphs.instance import own_attribute
from .contract import (
    ATTENTION_FUNCTIONS,
    EAGER_ATTENTION,
    HF_MODELS,
    OUTLINES,
    PLACES,
    SDPA,
    described,
    held_now,
    is_ours,
    put_back,
    shipped,
    upstreams,
)

# Attributes of modules that hold what is called and is no module.
_HELPERS = ("token_dispatcher",)


def as_shipped(owner: Any, *names: str) -> bool:
    """Whether functions of an object, or of a module of Python, are upstream's own; see `foreign`."""
    return foreign(owner, *names) is None


def refuse_own_code(found: Iterable[str | None]) -> None:
    """Refuse what would go around a function that is not upstream's, as `foreign` and `foreign_function` find it.

    Raises:
        Refused: There is one.
    """
    for words in filter(None, found):
        raise Refused(Fallback.OWN_CODE, words)


def foreign(owner: Any, *names: str) -> str | None:
    """Return a function that is not the one that upstream shipped, and what is in its place; None where all are.

    Args:
        owner: An object whose methods these are, or a module of Python.
        names: Of the functions, each at a place of the contract.
    """
    for name in names:
        found = _not_shipped(owner, name)
        if found is not None:
            label = owner.__name__ if isinstance(owner, ModuleType) else type(owner).__name__
            return f"{label}.{name} is {described(found)}"
    return None


def _not_shipped(owner: Any, name: str) -> Any:
    """Return what is not upstream's at a name of an owner; None where it is upstream's, or missing."""
    if isinstance(owner, ModuleType):
        home, target, held = owner.__name__, name, vars(owner).get(name)
    else:
        kind, own = type(owner), own_attribute(owner, name)
        if own is not None and not is_ours(own) and getattr(own, "__func__", None) is not getattr(kind, name, own):
            return own
        base = next((base for base in kind.__mro__ if name in vars(base)), None)
        if base is None:
            return None
        home, target, held = base.__module__, f"{base.__qualname__}.{name}", vars(base)[name]
    found = upstreams(held)
    return None if found is shipped(home, target) else found


def own_code(modules: Iterable[Any]) -> str | None:
    """Return a function that a region would go around though it is not upstream's, in words; None without one.

    Args:
        modules: All modules of the region.
    """
    functions: dict[str, None] = {}
    for module in modules:
        for each in (module, *(vars(module)[name] for name in _HELPERS if name in vars(module))):
            kind: Any = type(each)
            for home, names in _outline_of(kind):
                functions[home] = None
                if found := foreign(each, *names):
                    return found
        if found := _attention_function(module):
            return found
    return next(filter(None, map(foreign_function, functions)), None)


def foreign_function(home: str, table: Mapping[str, tuple[str, ...]] = OUTLINES) -> str | None:
    """Return a function of a module of Python that is not the one that it shipped, in words; None without one.

    Args:
        home: The module.
        table: Names the functions.
    """
    names = (target for target in table[home] if "." not in target)
    return foreign(sys.modules[home], *names) if home in sys.modules else None


@functools.cache
def _outline_of(kind: type) -> list[tuple[str, tuple[str, ...]]]:
    """Return the modules of Python that have classes of a class in an outline, and the methods that it names."""
    found = []
    for base in kind.__mro__:
        prefix = f"{base.__qualname__}."
        targets = OUTLINES.get(base.__module__, ())
        names = tuple(target.removeprefix(prefix) for target in targets if target.startswith(prefix))
        if names:
            found.append((base.__module__, names))
    return found


def _attention_function(module: Any) -> str | None:
    """Return the function by which a module of Hugging Face's attends, if it is not one that was shipped."""
    kind: Any = type(module)
    attends = any(EAGER_ATTENTION in OUTLINES[home] for home, _ in _outline_of(kind))
    chosen = getattr(getattr(module, "config", None), "_attn_implementation", None)
    functions = getattr(sys.modules.get(HF_MODELS), ATTENTION_FUNCTIONS, {})
    if not attends or chosen not in functions:
        return None
    found, ours = functions[chosen], dict(shipped(HF_MODELS, ATTENTION_FUNCTIONS) or ())
    if ours.get(chosen) is not found:
        return f"the attention function {chosen!r} is {described(found)}"
    return foreign(functional, SDPA) if chosen == "sdpa" else None


# A schedule passes layers the microbatch's number and a pipeline stage its input, which graphs get as a tensor. When
# attention first gets lengths, it forgets the names of those that it does not pass on. A layer keeps what offloads its
# norm between two of its methods, and longer where a recompute ends before the second. A configuration holds functions
# of the loop.
BOOKKEEPING = frozenset(
    (
        *("current_microbatch", "is_first_microbatch", "input_tensor", "kept_packed_seq_params"),
        "mlp_norm_manager",
        *("timers", "grad_scale_func", "finalize_model_grads_func"),
        *("no_sync_func", "grad_sync_func", "param_sync_func"),
    )
)
look_not_into("megatron.core.timers", "megatron.core.process_groups_config")
# The all-to-all dispatcher keeps `probs` and `routing_map` of a pass, for one; statistics and caches are globals.
PACKAGES = frozenset(("megatron", "transformer_engine"))
# Where hooks are made that are part of a module's forward, or that gather parameters, for which replays wait, or that
# collect outputs in those calls alone that ask for them, or that let an output without parameters behind it need a
# gradient, which changes none.
OWN_HOOKS = (
    "megatron.bridge.peft.lora_layers",
    "megatron.core.distributed.distributed_data_parallel",
    "megatron.core.extensions.transformer_engine",
    "megatron.core.transformer.moe.experts",
    "megatron.core.transformer.moe.shared_experts",
    "transformers.modeling_utils",
    "transformers.utils.output_capturing",
)


def own_hook(hook: Callable[..., Any]) -> bool:
    """Whether a module's hook is upstream's own, or the plugin's."""
    function = getattr(hook, "func", hook)  # of a partial
    module = getattr(function, "__module__", None) or ""
    return module in OWN_HOOKS or module.partition(".")[0] == __name__.partition(".")[0]


EXEMPT = Exempt(BOOKKEEPING, own_hook, PACKAGES, held_now, put_back, PLACES, own_code)
