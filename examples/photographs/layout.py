"""How a training run is laid out over GPUs. Imports neither torch nor Megatron."""

from dataclasses import dataclass
from typing import Any

# The language model's layers that the first pipeline stage must hold: one for each deepstack feature.
FIRST_STAGE_LAYERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of a run's parallel groups.

    Attributes:
        tensor: Tensor parallelism, with sequence parallelism in the language model.
        pipeline: Pipeline stages; the first holds the vision encoder.
        chunks: Model chunks of each pipeline stage; with more than one the schedule is interleaved.
        context: Context parallelism.
        data: Data parallelism.

    Raises:
        ValueError: A size below 1, or several chunks without a pipeline.
    """

    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    context: int = 1
    data: int = 1

    def __post_init__(self) -> None:
        for name, size in self.sizes().items():
            if size < 1:
                raise ValueError(f"Cannot use --{name}-parallel {size}: it must be 1 or more.")
        if self.chunks < 1 or (self.chunks > 1 and self.pipeline == 1):
            raise ValueError(
                f"Cannot use --pipeline-chunks {self.chunks}: it must be 1, or more with --pipeline-parallel."
            )

    def sizes(self) -> dict[str, int]:
        """Return all sizes by name."""
        return {"data": self.data, "tensor": self.tensor, "pipeline": self.pipeline, "context": self.context}

    @property
    def ranks(self) -> int:
        """Processes, with a GPU each where none is shared."""
        return self.tensor * self.pipeline * self.context * self.data

    def __str__(self) -> str:
        letters = {"data": "DP", "tensor": "TP", "pipeline": "PP", "context": "CP"}
        parts = [f"{letters[name]}{size}" for name, size in self.sizes().items() if size > 1]
        chunks = f"VP{self.chunks}" if self.interleaved else ""
        return "x".join(parts) + chunks or "one GPU"

    @property
    def interleaved(self) -> bool:
        """Whether pipeline stages hold several chunks of the model."""
        return self.chunks > 1

    def words(self) -> list[str]:
        """Return the words of a command line that say this layout."""
        words = [word for name, size in self.sizes().items() if size > 1 for word in (f"--{name}-parallel", str(size))]
        return [*words, "--pipeline-chunks", str(self.chunks)] if self.interleaved else words

    @property
    def first_stage_layers(self) -> int:
        """Layers of the language model on the first stage: each of its chunks is as deep."""
        return FIRST_STAGE_LAYERS * self.chunks

    def fitting_layers(self, layers: int) -> int:
        """Return a depth of the language model that can be spread over the stages: `layers` where that can.

        The first stage takes its layers, the others share the rest evenly between all their chunks.
        """
        if self.pipeline == 1:
            return layers
        others = (self.pipeline - 1) * self.chunks
        return self.first_stage_layers + others * max((layers - self.first_stage_layers) // others, 1)

    def check_processes(self, started: str | None) -> None:
        """Refuse another number of processes than the layout has ranks.

        Args:
            started: Processes that torchrun started; None where it did not.

        Raises:
            ValueError: They are more or fewer.
        """
        if started is not None and int(started) != self.ranks:
            raise ValueError(
                f"Cannot train in {started} processes: the layout {self} has {self.ranks} ranks. Pass --nproc_per_node "
                f"{self.ranks}, or set --data-parallel."
            )

    def check_gpus(self, found: int) -> None:
        """Refuse fewer GPUs than ranks.

        Args:
            found: GPUs that there are.

        Raises:
            ValueError: They are too few.
        """
        if found < self.ranks:
            raise ValueError(
                f"Cannot use {' '.join(self.words())}: the layout {self} has {self.ranks} ranks with a GPU each, and "
                f"there are {found} GPUs. Set smaller sizes."
            )

    def check_layers(self, layers: int) -> None:
        """Refuse a language model that cannot be spread over the stages.

        Raises:
            ValueError: The first stage, which takes 3 layers a chunk, leaves none for another, or others get unequal
                shares.
        """
        fitting = self.fitting_layers(layers)
        if fitting != layers:
            chunks = f" --pipeline-chunks {self.chunks}" if self.interleaved else ""
            raise ValueError(
                f"Cannot use --pipeline-parallel {self.pipeline}{chunks} with {layers} layers: the first stage takes "
                f"{self.first_stage_layers}, the others must have a multiple of {(self.pipeline - 1) * self.chunks}. "
                f"Write --language-model {fitting}x2048, say."
            )

    def model_fields(self) -> dict[str, Any]:
        """Return the model provider's fields."""
        return {
            "tensor_model_parallel_size": self.tensor,
            "sequence_parallel": self.tensor > 1,
            "pipeline_model_parallel_size": self.pipeline,
            "num_layers_in_first_pipeline_stage": self.first_stage_layers if self.pipeline > 1 else None,
            **self._interleaving(),
            "context_parallel_size": self.context,
        }

    def _interleaving(self) -> dict[str, Any]:
        if not self.interleaved:
            return {}
        # Between two stages a chunk's input and another's output are under way at once: each is a message of its own.
        return {
            "virtual_pipeline_model_parallel_size": self.chunks,
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
        }
