"""Gemma 3's vision encoder, Hugging Face's SigLIP: images all have one size, only their number varies."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from ...graphs.fallback import Fallback
from ...graphs.instance import own_method
from ...graphs.planning.buckets import Bucket
from ...graphs.program import Buffers, RegionProgram, TensorSpec
from ...graphs.rows import write_rows
from ...graphs.workload import Call
from ...upstream_types import UpstreamModule
from ...vision.adapter import EncoderFamily, RecordingKernels, encoder_call
from ...vision.batch import BatchError, HostGrids, ImageBatch, check_device, images_misfit
from ..kernels.saved_tensors import known_activations
from .packed_towers import held_as, refuse_checkpointing, result, returns_an_object


class SiglipEncoder:
    """The encoder's own forward on a padded number of images. Buckets have no limits; images do not see each other.

    Args:
        model: Hugging Face's `SiglipVisionModel`.
        kernels: Entered around the recorded forward.
    """

    name = "vision_encoder"

    def __init__(self, model: UpstreamModule, kernels: RecordingKernels = nullcontext) -> None:
        self.model = model
        self._kernels = kernels
        self._patches = patches_of(model)

    def modules(self) -> Sequence[nn.Module]:
        """See `RegionProgram`."""
        return (self.model,)

    def input_specs(self, bucket: Bucket) -> dict[str, TensorSpec]:
        """See `RegionProgram`."""
        config, weight = self.model.config, self.model.embeddings.patch_embedding.weight
        shape = (bucket.tokens // self._patches, config.num_channels, config.image_size, config.image_size)
        return {"pixels": TensorSpec(shape, weight.dtype)}

    def size(self, batch: ImageBatch) -> int:
        """See `RegionProgram`."""
        return batch.tokens

    def refuse(self, batch: ImageBatch, bucket: Bucket) -> Fallback | None:
        """See `RegionProgram`."""
        return None

    def load(self, buffers: Buffers, batch: ImageBatch) -> None:
        """See `RegionProgram`."""
        write_rows(buffers["pixels"], batch.pixels)

    def load_example(self, buffers: Buffers, bucket: Bucket) -> None:
        """See `RegionProgram`."""
        buffers["pixels"].zero_()

    def forward(self, buffers: Buffers, bucket: Bucket) -> tuple[Tensor, ...]:
        """See `RegionProgram`. Outputs: hidden states `[images, patches, width]`, and the pooled ones with a head."""
        return siglip_outputs(own_method(self.model, "forward")(buffers["pixels"], return_dict=True))

    def recording(self) -> AbstractContextManager[None]:
        """See `RegionProgram`."""
        return self._kernels(self.modules())

    def output_rows(self, batch: ImageBatch) -> tuple[int, ...]:
        """See `RegionProgram`."""
        outputs: int = 1 + self.model.use_head
        return (batch.shape.frames,) * outputs

    def differentiable_inputs(self, batch: ImageBatch) -> tuple[Tensor, ...]:
        """See `RegionProgram`: pixels take no gradient."""
        return ()


class SiglipAdapter:
    """See `EncoderAdapter`.

    Args:
        model: Hugging Face's `SiglipVisionModel`.

    Raises:
        OptionError: The model checkpoints its layers.
    """

    unit_of = "one image"
    deterministic_tokens = math.inf

    def __init__(self, model: UpstreamModule) -> None:
        refuse_checkpointing(model)
        self._model = model
        self.unit = patches_of(model)

    def read(
        self, grids: HostGrids, pixel_values: Tensor, interpolate_pos_encoding: bool | None = False, **others: Any
    ) -> Call:
        """See `EncoderAdapter`."""
        config, batch = self._model.config, ImageBatch(pixel_values, self.unit)
        misfit = images_misfit(batch, config.num_channels, config.image_size)
        if misfit is not None and pixel_values.dim() != 4:
            raise BatchError(misfit)
        check_device(pixel_values, self._model.embeddings.patch_embedding.weight.device)
        if interpolate_pos_encoding:
            return encoder_call(batch, usual=False)
        return encoder_call(batch, returns_an_object(self._model, others), misfit)

    def run(self, forward: Callable[..., Any], batch: ImageBatch) -> Any:
        """See `EncoderAdapter`."""
        return forward(batch.pixels, return_dict=True)

    def outputs(self, returned: Any) -> tuple[Tensor, ...]:
        """See `EncoderAdapter`."""
        return siglip_outputs(returned)

    def returned(self, outputs: Sequence[Tensor]) -> Any:
        """See `EncoderAdapter`."""
        hidden, *pooled = outputs
        return result(last_hidden_state=hidden, pooler_output=pooled[0] if pooled else None)

    def bounds(self, capacity: int, frames: int, directly: bool) -> list[tuple[int, ...]]:
        """See `EncoderAdapter`: there are no limits besides the capacity."""
        return [()]

    def program(self, exact_below: int, kernels: RecordingKernels) -> RegionProgram:
        """See `EncoderAdapter`."""
        return SiglipEncoder(self._model, kernels)


def patches_of(model: UpstreamModule) -> int:
    """Return the patches of one image."""
    side: int = model.config.image_size // model.config.patch_size
    return side**2


def siglip_outputs(returned: Any) -> tuple[Tensor, ...]:
    """Return the tensors in what the encoder returned: hidden states, and the pooled ones where it has a head."""
    pooled = returned.pooler_output
    return (returned.last_hidden_state,) if pooled is None else (returned.last_hidden_state, pooled)


SIGLIP = EncoderFamily(
    name="SigLIP",
    find=held_as("vision_tower", "SiglipVisionModel"),
    adapt=SiglipAdapter,
    known_activations=known_activations,
)
