"""Gemma 3's vision encoder, Hugging Face's SigLIP: images all have one size, only their number varies."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...graphs.buckets import Bucket
from ...graphs.instance import own_method
from ...graphs.program import Buffers, Call, TensorSpec
from ...graphs.rows import write_rows
from ...vision.batch import BatchError, EncoderBatch, HostGrids, check_device, equal_images
from ...vision.encoder import Encoder, EncoderFamily, encoder_call
from ..kernels.recompute import recomputing
from ..kernels.transformer_engine import known_activations
from .packed_towers import held_as, result, returns_an_object


class SiglipEncoder(Encoder):
    """The own forward of Hugging Face's `SiglipVisionModel` on a padded number of images, which do not see each other.

    Buckets have no limits.
    """

    unit_of = "one image"

    def prepare(self) -> None:
        """See `Encoder`."""
        config = self.model.config
        self.unit = (config.image_size // config.patch_size) ** 2
        self._image = (config.num_channels, config.image_size, config.image_size)

    def input_specs(self, bucket: Bucket) -> dict[str, TensorSpec]:
        """See `RegionProgram`."""
        dtype = self.model.embeddings.patch_embedding.weight.dtype
        return {"pixels": TensorSpec((bucket.tokens // self.unit, *self._image), dtype)}

    def load(self, buffers: Buffers, batch: EncoderBatch) -> None:
        """See `RegionProgram`."""
        write_rows(buffers["pixels"], batch.pixels)

    def forward(self, buffers: Buffers, bucket: Bucket) -> tuple[Tensor, ...]:
        """See `RegionProgram`. Outputs: hidden states `[images, patches, width]`, and the pooled ones with a head."""
        return self.outputs(own_method(self.model, "forward")(buffers["pixels"], return_dict=True))

    def read(
        self, grids: HostGrids, pixel_values: Tensor, interpolate_pos_encoding: bool | None = False, **others: Any
    ) -> Call:
        """See `Encoder`."""
        misfit = self._misfit(pixel_values)
        if misfit is not None and pixel_values.dim() != 4:
            raise BatchError(misfit)
        check_device(pixel_values, self.model.embeddings.patch_embedding.weight.device)
        batch = equal_images(pixel_values, len(pixel_values), self.unit)
        if interpolate_pos_encoding:
            return encoder_call(batch, usual=False)
        return encoder_call(batch, returns_an_object(self.model, others), misfit)

    def _misfit(self, pixels: Tensor) -> str | None:
        """Return how images differ from those that the encoder takes, None where they do not."""
        (channels, side, _), shape = self._image, tuple(pixels.shape)
        if len(shape) == 4 and shape[0] >= 1 and shape[1:] == self._image:
            return None
        return (
            f"pixel_values has shape {shape}, the encoder takes (images, {channels}, {side}, {side}) with at least one "
            "image; resize images as the model's processor does"
        )

    def outputs(self, returned: Any) -> tuple[Tensor, ...]:
        """See `Encoder`: hidden states, and the pooled ones where there is a head."""
        pooled = returned.pooler_output
        return (returned.last_hidden_state,) if pooled is None else (returned.last_hidden_state, pooled)

    def returned(self, outputs: Sequence[Tensor]) -> Any:
        """See `Encoder`."""
        hidden, *pooled = outputs
        return result(last_hidden_state=hidden, pooler_output=pooled[0] if pooled else None)


SIGLIP = EncoderFamily(
    name="SigLIP",
    find=held_as("vision_tower", "SiglipVisionModel"),
    encoder=SiglipEncoder,
    kernels=recomputing,
    known_activations=known_activations,
)
