"""A vision encoder as the graph manager sees it: calls as images, what is observed, results, notes."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..announce import announce
from ..graphs.planning.buckets import names_of, next_run
from ..graphs.region import Region
from ..graphs.workload import Call, Eager, Manager, Workload
from ..options import PROVIDER_FIELDS, VisionGraphOptions
from .adapter import EncoderFamily
from .batch import BatchError, HostGrids
from .capture import EncoderCapture
from .eager_costs import Clock
from .runs import CheckResult, EncoderRuns


class VisionWorkload(Workload):
    """See `Workload`. A call that eager refuses raises `BatchError`.

    Args:
        model: The vision encoder.
        options: What the user asked for.
        family: The encoder's upstream side.
        grids: Host copies of grids.
        clock: Times microbatches for `options.cost_fallback`; None takes device events, and no times without a GPU.

    Attributes:
        adapter: The encoder's.
        planned: What is captured, and how.
        runs: How a microbatch is replayed or run eager.
    """

    noun = "encoder"
    out_of_memory_remedy = (
        "Lower max_vision_cuda_graph_seq_length, vision_cuda_graph_tuning.slots or vision_cuda_graph_buckets_max_gb, "
        "or give vision_cuda_graph_buckets a smaller largest bucket."
    )
    counts_tokens = True
    runs: EncoderRuns

    def __init__(
        self,
        model: nn.Module,
        options: VisionGraphOptions,
        family: EncoderFamily,
        grids: HostGrids | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.options, self.family = options, family
        self.title, self.group = f"{family.encodes} CUDA graphs", f"{family.encodes}_cuda_graph"
        self.strict = options.strict
        self.grids = grids or HostGrids()
        self.adapter = family.adapt(model)
        self.planned = EncoderCapture(model, options, family, self.adapter)
        self._clock = clock

    def attach(self, manager: Manager) -> None:
        """See `Workload`."""
        super().attach(manager)
        self.planned.begin(manager.executor.device)
        self.runs = EncoderRuns(manager, self.options, self.family, self.adapter, self._clock)

    def detach(self) -> None:
        """See `Workload`."""
        self.planned.end()

    @property
    def buckets(self) -> tuple[int, ...] | None:
        """Tokens of the buckets there are; None before."""
        return self.planned.buckets

    @property
    def checks(self) -> list[CheckResult]:
        """Results of the run-time check."""
        return self.runs.checks

    @property
    def attention(self) -> str:
        """What attention recordings call, as `vision_cuda_graph_tuning.attention` names it."""
        return self.planned.kernels.attention

    def read(self, *args: Any, **kwargs: Any) -> Call:
        """See `Workload`."""
        return self.adapter.read(self.grids, *args, **kwargs)

    def observe(self, call: Call) -> None:
        """See `Workload`."""
        if call.misfit is None:
            self.planned.observe(call.batch)

    def capture(self) -> None:
        """See `Workload`."""
        self.planned.capture(self.manager)

    def captured(self) -> None:
        """See `Workload`."""
        self.manager.consensus.agree(self._tell)

    def _tell(self) -> float:
        most = f"{self.planned.plan.max_frames()} {'clips' if self.family.encodes == 'audio' else 'frames'}"
        later = "" if self.planned.demand is None else ", others as microbatches ask for them"
        announce(f"{self.title}: {names_of(self.buckets or ())}{later}; {self.manager.slots} slot(s), up to {most}")
        return 0.0

    def grown(self) -> None:
        """See `Workload`."""
        self.planned.note_buckets()
        self.runs.grown()

    def forget(self) -> None:
        """See `Workload`."""
        self.runs.forget()

    def replay(self, region: Region, batch: Any) -> tuple[Tensor, ...] | None:
        """See `Workload`."""
        return self.runs.replay(region, batch)

    def run_eager(self, call: Call, eager: Eager) -> Any:
        """See `Workload`.

        Raises:
            BatchError: The pixels do not fit what describes them, or the encoder, and eager refuses them.
        """
        return self.runs.eager(call, partial(_explained, call, eager))

    def returned(self, outputs: tuple[Tensor, ...]) -> Any:
        """See `Workload`."""
        return self.adapter.returned(outputs)

    def warmup_microbatches(self) -> int:
        """See `Workload`."""
        return self.planned.plan.microbatches

    def notes(self) -> dict[str, str]:
        """See `Workload`."""
        notes = {}
        if self.buckets is not None:
            notes["plan"] = names_of(self.buckets)
        if self.planned.demand is not None and self.buckets and self.family.encodes == "vision":
            notes["next run"] = next_run(self.buckets, PROVIDER_FIELDS["buckets"])
        if self.checks:
            worst = max(max(c.forward, c.gradient or 0.0) for c in self.checks)
            notes["checks"] = f"{len(self.checks)} replays compared with eager, largest difference {worst:.2e}"
        if self.grids.device_reads:
            notes["grid reads"] = f"{self.grids.device_reads} grids were read from the device"
        return notes


def _explained(call: Call, eager: Eager) -> Any:
    """Run a call eager; an error over pixels that do not fit is raised as a `BatchError`."""
    try:
        return eager()
    except Exception as error:
        if call.misfit is None or isinstance(error, torch.OutOfMemoryError):
            raise
        raise BatchError(call.misfit) from error
