"""All graph options of a model as one typed value."""

from dataclasses import dataclass, field

from .choice import ChoiceOptions, Part
from .language_model import LanguageModelGraphOptions
from .offload import OffloadOptions
from .packed import PackedOptions
from .vision import VisionGraphOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions:
    """Everything that a user can say about CUDA graphs of a model.

    Attributes:
        choice: The one setting for all of them.
        language_model: Graphs of the language model.
        vision: Graphs of the vision encoder.
        packed: Packed (thd) sequences in language-model graphs.
        offload: Activation offloading, of all of them.
        warnings: What the user should know: deprecated spellings, options without effect, wrong gradients of
            upstream.
        chosen: What the one setting came to.
    """

    choice: ChoiceOptions = field(default_factory=ChoiceOptions)
    language_model: LanguageModelGraphOptions = field(default_factory=LanguageModelGraphOptions)
    vision: VisionGraphOptions = field(default_factory=VisionGraphOptions)
    packed: PackedOptions = field(default_factory=PackedOptions)
    offload: OffloadOptions = field(default_factory=OffloadOptions)
    warnings: tuple[str, ...] = field(default=(), compare=False)
    chosen: tuple[Part, ...] = field(default=(), compare=False)

    @property
    def enabled(self) -> bool:
        """Whether any graphs are asked for."""
        return self.language_model.enabled or self.vision.enabled
