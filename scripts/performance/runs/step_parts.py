"""A Bridge training callback that profiles one step: GPU time by part of the step and by family of kernels."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.bridge.training.callbacks import Callback, CallbackContext
from torch import Tensor, nn

from bridge_cg_plugin.cli.runs.recorder import graph_statistics
from bridge_cg_plugin.upstream.encoders.registry import find_encoder
from bridge_cg_plugin.upstream.wrappers import holders
from scripts.performance.measuring.measure import Profile
from scripts.performance.measuring.step_times import (
    BETWEEN,
    END,
    LANGUAGE_MODEL,
    OPTIMIZER,
    VISION,
    begin_part,
    parts_of,
)
from scripts.performance.models.arithmetic import (
    Trained,
    language_model_flops,
    language_model_shape_of,
    shape_of,
    step_flops,
)

Mark = Callable[[str], None]


class Boundaries:
    """Marks where parts of a step begin, by hooks on the model.

    Args:
        mark: Called with the part that begins, on the stream that computes it.
        vision: The vision encoder; None on a rank without one.
        language_model: The language model; None on a rank without one.
    """

    def __init__(self, mark: Mark, vision: nn.Module | None, language_model: nn.Module | None) -> None:
        self._mark = mark
        for module, part in ((vision, VISION), (language_model, LANGUAGE_MODEL)):
            if module is not None:
                module.register_forward_pre_hook(lambda *_, part=part: mark(part))
        if vision is not None:
            vision.register_forward_hook(self._encoded)
        if language_model is not None:
            language_model.register_forward_pre_hook(self._embedded, with_kwargs=True)
            language_model.register_forward_hook(self._computed)

    def _encoded(self, module: nn.Module, arguments: Any, output: Any) -> None:
        for tensor in _tensors(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(lambda *_: self._in_backward(VISION))
        self._mark(BETWEEN)

    def _embedded(self, module: nn.Module, arguments: Any, named: dict[str, Any]) -> None:
        embeddings = named.get("decoder_input")
        if isinstance(embeddings, Tensor) and embeddings.requires_grad:
            embeddings.register_hook(lambda _: self._in_backward(BETWEEN))

    def _computed(self, module: nn.Module, arguments: Any, output: Any) -> None:
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._in_backward(LANGUAGE_MODEL))
        self._mark(BETWEEN)

    def _in_backward(self, part: str) -> None:
        self._mark(part)
        # After the pass's last kernel.
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._mark(BETWEEN))


def _tensors(output: Any) -> list[Tensor]:
    """Return the tensors of an output, which may be nested in sequences."""
    if isinstance(output, Tensor):
        return [output]
    return [tensor for each in output for tensor in _tensors(each)] if isinstance(output, (tuple, list)) else []


class StepParts(Callback):
    """Profiles a step after `steps` others; `record()` has its figures after training.

    The profiler begins a step before, so that the GPU is as warm as in training. A step in which something was recorded
    for graphs is no usual one: a later step is profiled in its place.

    Args:
        steps: Steps before it.
    """

    def __init__(self, steps: int) -> None:
        self._left, self._active = steps, False
        self._recordings_s = 0.0
        self._marks: list[str] = []
        self._profile: Profile | None = None
        self._optimizer: Any = None  # whose steps are marked
        self._found: dict[str, Any] = {}
        self._vision: nn.Module | None = None
        self._language_model: nn.Module | None = None
        self._grids: list[Tensor] = []
        self._documents: list[Tensor] = []

    def on_train_start(self, context: CallbackContext) -> None:
        """Put hooks on the model, before anything of it is captured."""
        found = find_encoder(context.model)
        self._vision = None if found is None else found.model
        models = (getattr(holder, "language_model", None) for holder in holders(context.model))
        self._language_model = next((model for model in models if isinstance(model, nn.Module)), None)
        Boundaries(self._begin, self._vision, self._language_model)
        for module, keep in ((self._vision, self._keep_grid), (self._language_model, self._keep_documents)):
            if module is not None:
                module.register_forward_pre_hook(keep, with_kwargs=True)

    def _begin(self, part: str) -> None:
        if self._active:
            self._marks.append(part)
            begin_part()

    def _keep_grid(self, module: nn.Module, arguments: Any, named: dict[str, Any]) -> None:
        grid = named.get("grid_thw")
        if self._active and grid is not None:
            self._grids.append(grid)

    def _keep_documents(self, module: nn.Module, arguments: Any, named: dict[str, Any]) -> None:
        if self._active:
            params = named.get("packed_seq_params")
            self._documents.append(_rows(named["input_ids"]) if params is None else params.cu_seqlens_q)

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Prepare the profiler, and start it before the next step."""
        if self._left > 0 or self._found:
            return
        if self._profile is None:
            self._profile = Profile()
            self._profile.prepare()
            return
        self._marks, self._grids, self._documents = [], [], []
        if self._optimizer is None:
            self._optimizer = context.optimizer
            _around(self._optimizer, "step", lambda: self._begin(OPTIMIZER), lambda: self._begin(BETWEEN))
        self._profile.start()
        self._active, self._recordings_s = True, _recordings_s()
        self._begin(BETWEEN)

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Stop it and read what it has."""
        self._left -= 1
        if not self._active or self._profile is None:
            return
        self._begin(END)
        self._active = False
        spans, self._profile = self._profile.stop(), None
        if _recordings_s() != self._recordings_s:
            return
        try:
            self._found = {**parts_of(spans, self._marks), "parts_tflop": self._tflop(context)}
        except ValueError as error:  # the run's other figures are worth keeping
            print(f"the step's parts are not known: {error}", flush=True)

    def _tflop(self, context: CallbackContext) -> dict[str, float]:
        """Return the arithmetic of each part's share on this GPU, in TFLOP."""
        model = context.state.cfg.model
        share = 1e12 * model.tensor_model_parallel_size * model.context_parallel_size
        found = {}
        if self._vision is not None and self._grids:
            rows = [(int(t), int(h), int(w)) for grid in self._grids for t, h, w in grid.tolist()]
            found[VISION] = step_flops(rows, shape_of(self._vision), trained(self._vision)) / share
        if self._language_model is not None:
            documents = [int(length) for offsets in self._documents for length in offsets.diff().tolist()]
            shape = language_model_shape_of(self._language_model)
            kind = trained(self._language_model, self._vision)
            stages = model.pipeline_model_parallel_size  # the first of which has the whole encoder
            found[LANGUAGE_MODEL] = language_model_flops(documents, shape, kind) / share / stages
        return found

    def record(self) -> dict[str, Any]:
        """Return the fields of a benchmark record (docs/benchmarks/format.md); none before the step."""
        return self._found


def _rows(tokens: Tensor) -> Tensor:
    """Return where each row of `tokens`, [rows, length], begins, and where the last one ends."""
    rows, length = tokens.shape
    return torch.arange(rows + 1) * length


def _recordings_s() -> float:
    """Return the seconds that graphs took to record so far."""
    return float(sum(each["capture_seconds"] for each in graph_statistics().values()))


def trained(module: nn.Module, before: nn.Module | None = None) -> Trained:
    """Return what of a module is trained.

    Args:
        module: The module; its weights are where most of their elements are.
        before: What computes its inputs.
    """
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in module.parameters()]
    weights = sum(size for size, needed in sizes if needed)
    inside = weights > 0 or (before is not None and any(p.requires_grad for p in before.parameters()))
    return Trained(weights=2 * weights > sum(size for size, _ in sizes), inputs=inside)


def _around(owner: Any, name: str, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Let a method of an object be called between two functions from here on."""
    old = getattr(owner, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        before()
        found = old(*args, **kwargs)
        after()
        return found

    setattr(owner, name, called)
