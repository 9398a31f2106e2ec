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
        context: Context parallelism.
        data: Data parallelism.

    Raises:
        ValueError: A size below 1.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    data: int = 1

    def __post_init__(self) -> None:
        for name, size in self.sizes().items():
            if size < 1:
                raise ValueError(f"--{name}-parallel {size}: allowed is 1 or more")

    def sizes(self) -> dict[str, int]:
        """Return all sizes by name."""
        return {"data": self.data, "tensor": self.tensor, "pipeline": self.pipeline, "context": self.context}

    @property
    def gpus(self) -> int:
        """GPUs, one process each."""
        return self.tensor * self.pipeline * self.context * self.data

    def __str__(self) -> str:
        letters = {"data": "DP", "tensor": "TP", "pipeline": "PP", "context": "CP"}
        parts = [f"{letters[name]}{size}" for name, size in self.sizes().items() if size > 1]
        return "x".join(parts) or "one GPU"

    def words(self) -> list[str]:
        """Return the words of a command line that say this layout."""
        return [word for name, size in self.sizes().items() if size > 1 for word in (f"--{name}-parallel", str(size))]

    def check_processes(self, started: str | None) -> None:
        """Refuse another number of processes than the layout has GPUs.

        Args:
            started: Processes that torchrun started; None where it did not.

        Raises:
            ValueError: They are more or fewer.
        """
        if started is not None and int(started) != self.gpus:
            raise ValueError(
                f"torchrun started {started} processes, the layout {self} has {self.gpus}; pass --nproc_per_node "
                f"{self.gpus}, or set --data-parallel"
            )

    def check_layers(self, layers: int) -> None:
        """Refuse a language model that cannot be spread over the stages.

        Raises:
            ValueError: The first stage, which takes 3 layers, leaves none for another, or others get unequal shares.
        """
        if self.pipeline == 1:
            return
        rest, stages = layers - FIRST_STAGE_LAYERS, self.pipeline - 1
        if rest < stages or rest % stages:
            raise ValueError(
                f"--pipeline-parallel {self.pipeline} with {layers} layers: the first stage takes "
                f"{FIRST_STAGE_LAYERS}, allowed is that and a multiple of {stages}; write --language-model "
                f"{FIRST_STAGE_LAYERS + stages * max(rest // stages, 1)}x2048, say"
            )

    def model_fields(self) -> dict[str, Any]:
        """Return the model provider's fields."""
        return {
            "tensor_model_parallel_size": self.tensor,
            "sequence_parallel": self.tensor > 1,
            "pipeline_model_parallel_size": self.pipeline,
            "num_layers_in_first_pipeline_stage": FIRST_STAGE_LAYERS if self.pipeline > 1 else None,
            "context_parallel_size": self.context,
        }
