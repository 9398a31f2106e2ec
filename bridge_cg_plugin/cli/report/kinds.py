"""The kinds of graphs that the plugin reports on, and how each is called in every source."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GraphKind:
    """One kind of graphs.

    Attributes:
        name: On the page.
        title: First line of the plugin's report at the end of training.
        group: What tags of its figures in loggers begin with.
        field: Field of a benchmark record that has its statistics.
    """

    name: str
    title: str
    group: str
    field: str


KINDS = (
    GraphKind("vision", "vision CUDA graphs", "vision_cuda_graph", "graphs"),
    GraphKind("audio", "audio CUDA graphs", "audio_cuda_graph", "audio_graphs"),
    GraphKind("language model", "language-model CUDA graphs", "language_model_cuda_graph", "language_model_graphs"),
    GraphKind("packed sequences", "packed-sequence CUDA graphs", "packed_cuda_graph", "packed_graphs"),
)
