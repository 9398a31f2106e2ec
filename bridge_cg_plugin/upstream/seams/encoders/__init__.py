"""Vision towers and audio encoders of Hugging Face's that this package captures: a module for each declares it.

Besides its region (`upstream/encoders`), that is all the rest of the code depends on: patches, seams,
features, `doctor` and `explain` look through this folder. The plugin is loaded in every process that imports PyTorch,
so a declaration imports next to nothing before its seams are asked for.
"""

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from ..seam import Seam

type Seams = tuple[Seam, ...]
MODELS = "megatron.bridge.models"
VLM_STEP = "megatron.bridge.training.vlm_step"


class HubModels(NamedTuple):
    """Models on Hugging Face's hub, for `bridge-cg explain`, which does without their configurations.

    Attributes:
        names: Regular expression of their names.
        experts: Of a layer of the language model; None for a dense one.
        encoder: Its layers and width; None where models differ.
    """

    names: str
    experts: int | None = None
    encoder: tuple[int, int] | None = None


class Model(NamedTuple):
    """Models of one of Bridge's providers.

    Attributes:
        module, provider: Of the provider's class.
        hub: Their names on the hub.
        config_field: The provider's field with the encoder's configuration.
        steps: Modules of the forward steps that make their batches.
    """

    module: str
    provider: str
    hub: tuple[HubModels, ...] = ()
    config_field: str = "vision_config"
    steps: tuple[str, ...] = (VLM_STEP,)


class Declaration(NamedTuple):
    """An encoder.

    Attributes:
        name: Of the models that have it.
        model: Where Bridge builds it.
        region: Module of `upstream/encoders` and name of its `EncoderFamily` there, as "module:name".
        seams: Returns what is expected of upstream, for the encoder's feature.
        encodes: As `EncoderFamily` has it.
    """

    name: str
    model: Model
    region: str
    seams: Callable[[str], Seams]
    encodes: Literal["vision", "audio"] = "vision"

    @property
    def feature(self) -> str:
        """What the seams serve."""
        return f"{self.encodes} graphs of {self.name}"


@cache
def declared() -> tuple[Declaration, ...]:
    """Return the encoders of this folder by the names of their modules, those of images first."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    found = [importlib.import_module(f"{__name__}.{name}").ENCODER for name in names]
    return tuple(sorted(found, key=lambda one: one.encodes != "vision"))


@cache
def models() -> tuple[Model, ...]:
    """Return their models, each once."""
    return tuple(dict.fromkeys(one.model for one in declared()))
