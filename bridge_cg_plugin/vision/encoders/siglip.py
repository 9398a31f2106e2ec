"""An encoder of images that all have one size, Hugging Face's SigLIP, as a region: only their number varies."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from ...graphs.buckets import Bucket
from ...graphs.fallback import Fallback
from ...graphs.program import Buffers, RegionProgram, TensorSpec
from ...graphs.rows import write_rows
from ...upstream_types import UpstreamModule
from ..adapter import EncoderCall, RecordingKernels
from ..batch import BatchError, ImageBatch, check_device, images_misfit
from ..host_grids import HostGrids
from .hugging_face_calls import returns_an_object


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
        # The instance's forward stands in for this one while graphs are on.
        return siglip_outputs(type(self.model).forward(self.model, buffers["pixels"], return_dict=True))

    def recording(self) -> AbstractContextManager[None]:
        """See `RegionProgram`."""
        return self._kernels(self.modules())

    def output_rows(self, batch: ImageBatch) -> tuple[int, ...]:
        """See `RegionProgram`."""
        outputs: int = 1 + self.model.use_head
        return (batch.frames,) * outputs

    def differentiable_inputs(self, batch: ImageBatch) -> tuple[Tensor, ...]:
        """See `RegionProgram`: pixels take no gradient."""
        return ()


class SiglipAdapter:
    """See `EncoderAdapter`.

    Args:
        model: Hugging Face's `SiglipVisionModel`.
        make_result: Makes what its forward returns from the hidden states and, with a head, the pooled ones.
    """

    unit_of = "one image"
    deterministic_tokens = math.inf

    def __init__(self, model: UpstreamModule, make_result: Callable[..., Any]) -> None:
        self._model, self._make_result = model, make_result
        self.unit = patches_of(model)

    def read(
        self, grids: HostGrids, pixel_values: Tensor, interpolate_pos_encoding: bool | None = False, **others: Any
    ) -> EncoderCall:
        """See `EncoderAdapter`."""
        config, batch = self._model.config, ImageBatch(pixel_values, self.unit)
        misfit = images_misfit(batch, config.num_channels, config.image_size)
        if misfit is not None and pixel_values.dim() != 4:
            raise BatchError(misfit)
        check_device(pixel_values, self._model.embeddings.patch_embedding.weight.device)
        if interpolate_pos_encoding:
            return EncoderCall(batch, usual=False)
        return EncoderCall(batch, returns_an_object(others), misfit)

    def run(self, forward: Callable[..., Any], batch: ImageBatch) -> Any:
        """See `EncoderAdapter`."""
        return forward(batch.pixels, return_dict=True)

    def outputs(self, returned: Any) -> tuple[Tensor, ...]:
        """See `EncoderAdapter`."""
        return siglip_outputs(returned)

    def returned(self, outputs: Sequence[Tensor]) -> Any:
        """See `EncoderAdapter`."""
        return self._make_result(*outputs)

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
