"""How recorded work is recomputed, and random states that it may draw from.

A recorded backward runs the same layers again, where upstream's settings say so. Upstream's own function can only be
differentiated by `backward()`, which adds to `.grad`; PyTorch's computes the same in any backward.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import count
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from ...graphs.errors import CaptureError
from ...graphs.instance import InstanceMethod, every_module, modules_where
from ...graphs.recordings.capture import default_generator
from ...offload.registry import View, view_of
from ...upstream_types import UpstreamModule
from ..seams.registry import seam
from ..seams.registry.engine import TE_ATTENTION
from ..wrappers import overridden

# Attention draws below a fork of its own, other dropout where a decoder forks around its layers.
ATTENTION, HIDDEN = "attention_dropout", "hidden_dropout"
CPU = torch.device("cpu")
ENGINES_ATTENTION = (TE_ATTENTION, "DotProductAttention")


def random_states() -> tuple[torch.Generator, ...]:
    """Return the generators of megatron-core's tracker.

    Dropout draws from them. They stand in for the default generator in attention, and under sequence parallelism in a
    decoder's layers; attention asks for its state without dropout, too: always before Transformer Engine 2.20.
    """
    return tuple(state for state in _states().values() if isinstance(state, torch.Generator))


@contextmanager
def usable_random_states(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Leave out forks of random states that a graph cannot use while these modules are recorded.

    A fork below which nothing is drawn changes nothing. A loop may have made such states before it built a model.

    Raises:
        CaptureError: A module draws from them.
    """
    if all(isinstance(state, torch.Generator) for state in _states().values()):
        yield
        return
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    if draws(modules, ATTENTION):
        raise _refusal(ATTENTION)

    def fork(name: str = "") -> AbstractContextManager[None]:
        if draws(modules, HIDDEN):
            raise _refusal(HIDDEN)
        return nullcontext()

    with overridden(get_cuda_rng_tracker(), "fork", fork):
        yield


def _states() -> Mapping[str, Any]:
    """Return the tracker's states by name; none before somebody has made a tracker."""
    from megatron.core.tensor_parallel.random import get_all_rng_states

    try:
        return get_all_rng_states() or {}
    except AssertionError:
        return {}


def draws(modules: Sequence[nn.Module], option: str) -> bool:
    """Whether one of these modules has dropout by an option of its configuration."""
    configs = (getattr(module, "config", None) for module in every_module(modules) if module.training)
    return any(getattr(config, option, None) for config in configs)


def _refusal(option: str) -> CaptureError:
    return CaptureError(
        f"{option} draws from random states that a graph cannot use: seed them by "
        "model_parallel_cuda_manual_seed(seed, te_rng_tracker=True) before the model is built, or set it to 0"
    )


# Where upstream's modules look it up.
RECOMPUTE, DISCARD = seam("recompute"), seam("recomputed_outputs")
PACKAGE = RECOMPUTE.module.rpartition(".")[0]
DISCARD_CLASS = DISCARD.target.partition(".")[0]
LAYERS_AGAIN = "_checkpointed_forward"  # of a decoder whose layers return more than their outputs
OF_HUGGING_FACE = "_gradient_checkpointing_func"  # in the layers of its encoders


@contextmanager
def recomputing(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let these modules keep the inputs of what they recompute, and run it again in a recorded backward.

    Where somebody else's function is in the place of upstream's, it stays.
    """
    run_again = partial(_recomputed, modules, bool(modules_where(_drops, modules)))
    package = importlib.import_module(PACKAGE)
    code = getattr(getattr(package, RECOMPUTE.target), "__code__", None)
    with ExitStack() as stack:
        # Where code lies proves whose it is; no look compares it, which other threads would see replaced.
        if code is not None and code.co_filename == importlib.import_module(RECOMPUTE.module).__file__:
            stack.enter_context(overridden(package, RECOMPUTE.target, run_again))
            if getattr(package, DISCARD_CLASS, None) is getattr(importlib.import_module(DISCARD.module), DISCARD_CLASS):
                stack.enter_context(overridden(package, DISCARD_CLASS, WithoutOutput))
        for layer in modules_where(_is_checkpointed, modules):
            stack.enter_context(overridden(layer, OF_HUGGING_FACE, lambda call, *args: run_again(call, False, *args)))
        try:
            yield
        finally:
            while _saving:  # a pass failed
                _saving.pop().__exit__()


def running_later(within: Callable[[], AbstractContextManager[None]]) -> AbstractContextManager[None]:
    """Return what lets that which is given to upstream's function run inside a context, now and in the backward.

    Args:
        within: Makes the context anew each time.
    """

    def checkpoint(keep_inputs_of: Callable[..., Any], function: Callable[..., Any], *args: Any) -> Any:
        def run(*inputs: Any) -> Any:
            with within():
                return function(*inputs)

        return keep_inputs_of(run, *args)

    return _instead(checkpoint)


@contextmanager
def lists_differentiated(decoder: UpstreamModule) -> Iterator[None]:
    """Let gradients reach what a decoder's recomputed layers return in lists, which upstream's function leaves alone.

    Qwen3-VL's encoder returns its deepstack features so: eager, their mergers and the layers below are trained wrongly.
    """

    def checkpoint(
        keep_inputs_of: Callable[..., Any], function: Callable[..., Any], divides: bool, hidden: Tensor, *args: Any
    ) -> Any:
        found: list[Any] = []
        # Upstream's function gives parameters gradients only if an input has one: of mergers above frozen layers, none.
        if torch.is_grad_enabled() and not hidden.requires_grad and any(p.requires_grad for p in decoder.parameters()):
            hidden = hidden.detach().requires_grad_()

        def run(*inputs: Any) -> tuple[Any, ...]:
            leaves, structure = tree_flatten(function(*inputs))
            found[:] = [structure]
            return tuple(leaves)

        return tree_unflatten(keep_inputs_of(run, divides, hidden, *args), found[0])

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _instead(checkpoint):
            return method.original(*args, **kwargs)

    method = InstanceMethod(decoder, LAYERS_AGAIN, forward)
    try:
        yield
    finally:
        method.restore()


@contextmanager
def _instead(checkpoint: Callable[..., Any]) -> Iterator[None]:
    """Have something called in place of upstream's function, with that in front of its arguments."""
    package = importlib.import_module(PACKAGE)
    with overridden(package, RECOMPUTE.target, partial(checkpoint, getattr(package, RECOMPUTE.target))):
        yield


def refuse_draws(modules: Sequence[nn.Module]) -> None:
    """Refuse to replay modules again in the backward that would draw other random numbers there.

    Raises:
        CaptureError: Adapters have dropout.
    """
    if modules_where(_drops, modules):
        raise CaptureError("layers run again in the backward, where adapters would drop others; set their dropout to 0")


def _drops(module: nn.Module) -> bool:
    return isinstance(module, nn.Dropout) and module.training and module.p > 0


def _is_checkpointed(module: UpstreamModule) -> bool:
    """Whether a module calls PyTorch's checkpoint as Hugging Face's layers do."""
    function = getattr(getattr(module, OF_HUGGING_FACE, None), "func", None)
    return function is torch.utils.checkpoint.checkpoint and bool(module.gradient_checkpointing)


def recomputed(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function as upstream's code does where it is to be recomputed."""
    return getattr(importlib.import_module(PACKAGE), RECOMPUTE.target)(function, False, *args)


# Of the pass under way: what it is inside of, and how many of the calls around what runs now are recomputed later.
_inside: list[Callable[[], AbstractContextManager[None]]] = []
_first_runs = 0


@contextmanager
def computing_inside(context: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Compute inside a context, which what is recomputed enters again: by then the forward has left it.

    Args:
        context: Made anew each time.
    """
    _inside.append(context)
    try:
        with context():
            yield
    finally:
        _inside.pop()


def runs_again() -> bool:
    """Whether what runs now is recomputed later, so that the second run counts it."""
    return _first_runs > 0


class _Dropped(torch.autograd.Function):
    """Drops by a mask, gradients too: PyTorch's own derivative would round the factor to the gradients' dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.factor = factor
        dropped: Tensor = torch.ops.aten.native_dropout_backward(x, mask, factor)
        return dropped

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return torch.ops.aten.native_dropout_backward(gradient, *ctx.saved_tensors, ctx.factor), None, None


class _Dropouts(TorchFunctionMode):
    """Lets later runs of the same work drop what the first one dropped: a graph's backward would draw anew."""

    _around: ClassVar[list["_Dropouts"]] = []  # runs under way, each inside of the one before

    def __init__(self) -> None:
        super().__init__()
        self._masks: list[Tensor] = []
        self._left: Iterator[Tensor] | None = None
        self._outer = self._around[-1] if self._around else None
        self._generator: torch.Generator | None = None
        self._state = torch.empty(0)
        self._others_drew = False

    def watch(self, generator: torch.Generator | None) -> None:
        """Begin the first run, which draws from a generator; None in a capture, which cannot tell who draws."""
        self._generator = generator
        self._note()

    def others_drew(self) -> bool:
        """Whether anything else has drawn in the first run."""
        if self._generator is not None:
            self._others_drew |= not torch.equal(self._generator.get_state(), self._state)
        return self._others_drew

    def begin_again(self) -> None:
        """Begin a later run."""
        self._left = iter(self._masks)

    def __enter__(self) -> Self:
        self._around.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._around.pop()

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return (self._drop if function is functional.dropout else function)(*args, **(kwargs or {}))

    def _drop(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p in (0, 1):
            return functional.dropout(x, p, training, inplace)
        # All runs save the same tensors for autograd, which a checkpoint counts.
        made: Tensor = _Dropped.apply(x, self._mask(x.detach(), p), 1 / (1 - p))
        return x.copy_(made) if inplace else made

    def _mask(self, x: Tensor, p: float) -> Tensor:
        if self._left is not None:
            return next(self._left)
        self.others_drew()
        mask = torch.native_dropout(x, p, True)[1] if self._outer is None else self._outer._mask(x, p)
        self._masks.append(mask)
        self._note()
        return mask

    def _note(self) -> None:
        if self._generator is not None:
            self._state = self._generator.get_state()


@contextmanager
def _first_run(modules: Sequence[nn.Module], given: Sequence[Any], dropouts: _Dropouts) -> Iterator[None]:
    """Be in the first of two runs, which draws nothing but dropout.

    Attention of Transformer Engine asks for a state without dropout, too, which changes no value.

    Raises:
        CaptureError: Something drew, which a second run would draw otherwise.
    """
    global _first_runs
    device = next((each.device for each in given if isinstance(each, Tensor)), CPU)
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    dropouts.watch(None if capturing else default_generator(device))
    _first_runs += 1
    try:
        yield
    finally:
        _first_runs -= 1
    if not dropouts.others_drew():
        return
    inside = every_module(modules)
    others = (each for each in inside if isinstance(each, _DropoutNd) and not isinstance(each, nn.Dropout))
    named = next((f"a {type(each).__name__} of p={each.p}" for each in others if each.training and each.p), "")
    kinds = (base for each in inside for base in type(each).__mro__)
    if named or not any((kind.__module__, kind.__name__) == ENGINES_ATTENTION for kind in kinds):
        raise CaptureError(
            "recompute inside a graph would draw other random numbers than its forward, which "
            f"{named or 'a layer'} does: let it draw nothing, or recompute nothing"
        )


def _recomputed(
    modules: Sequence[nn.Module],
    drops: bool,
    function: Callable[..., Any],
    distribute_saved_activations: bool,
    *args: Any,
) -> Any:
    """Stand in for upstream's `checkpoint`; inputs are not divided among ranks, which changes no value."""
    if dropout := next((name for name in (ATTENTION, HIDDEN) if draws(modules, name)), None):
        raise CaptureError(
            f"recompute inside a graph would draw other random numbers than its forward: set {dropout} to 0, or "
            "recompute nothing"
        )
    again, runs, dropouts = tuple(_inside), count(), _Dropouts()

    def run(*given: Any) -> Any:
        with ExitStack() as stack:
            if next(runs):
                dropouts.begin_again()
                for context in again:
                    stack.enter_context(context())
            else:
                stack.enter_context(_first_run(modules, given, dropouts))
            if drops:
                stack.enter_context(dropouts)
            return function(*given)

    # An early stop is an error, whose frames keep all that was computed again until a collection of garbage: through a
    # whole recorded backward.
    with set_checkpoint_early_stop(False):
        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, determinism_check="none")


_saving: list[saved_tensors_hooks] = []


class WithoutOutput:
    """Stands in for upstream's `CheckpointWithoutOutput`: the backward computes an output once more that others save.

    Between `checkpoint` and `discard_output_and_register_recompute` autograd keeps how to compute it in its place.
    """

    def checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return the function's output; several are kept."""
        output = function(*args)
        held = self._held = [output] if isinstance(output, Tensor) else []  # hooks live as long as what they saved
        given = [arg.detach() if isinstance(arg, Tensor) else arg for arg in args]
        again: list[Tensor] = []
        if held and output.requires_grad:
            output.register_hook(lambda gradient: again.clear())  # all that read it have their gradients

        def pack(tensor: Tensor) -> Tensor | View:
            if held and tensor.untyped_storage().data_ptr() == held[0].untyped_storage().data_ptr():
                return view_of(tensor)
            return tensor if tensor.is_leaf else tensor.detach()  # a node that held its own output would never be freed

        def unpack(saved: Tensor | View) -> Tensor:
            if isinstance(saved, Tensor):
                return saved
            if not again:
                with torch.no_grad():
                    again.append(function(*given))
            return saved.over(again[0].untyped_storage())

        _saving.append(saved_tensors_hooks(pack, unpack))
        _saving[-1].__enter__()
        return output

    def discard_output_and_register_recompute(self, hook_tensor: Tensor) -> None:
        """Take note that all who read the output have saved it."""
        _saving.pop().__exit__()
        self._held.clear()
