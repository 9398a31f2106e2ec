"""What vision graphs may take on each GPU."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Limits of vision graphs on one kind of GPU.

    Attributes:
        max_seq_length: Tokens (patches) of the largest bucket.
        memory_gb: GiB for the graphs of all slots together. Plans keep a fifth of it free, so it holds a bucket of
            `max_seq_length` tokens in one slot.
    """

    max_seq_length: int
    memory_gb: float


# A slot took 9.2 GiB at 6720 tokens and 20.6 GiB at 16384 on an H200 (docs/benchmarks/); the others follow from that
# line and from what the GPU's memory leaves beside weights and optimizer state.
GPUS = {
    "h100": Gpu(max_seq_length=8192, memory_gb=14.0),
    "h200": Gpu(max_seq_length=16384, memory_gb=26.0),
    "b200": Gpu(max_seq_length=24576, memory_gb=40.0),
}
