"""What a package beside the plugin brings for an encoder of its own: the model, and its one file of graphs."""

import math
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from bridge_cg_plugin.graphs.program import TensorSpec
from bridge_cg_plugin.graphs.rows import write_rows
from bridge_cg_plugin.vision.adapter import EncoderFamily, encoder_call
from bridge_cg_plugin.vision.batch import ImageBatch

PATCHES, WIDTH = 4, 6


class MeanTower(nn.Module):
    """Embeds images `[images, PATCHES, WIDTH]`: what their patches have in common."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace()
        self.first, self.second = nn.Linear(WIDTH, 8), nn.Linear(8, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(images)).mean(1))


class MeanModel(nn.Module):
    """Holds the tower as a model of Bridge's would."""

    def __init__(self) -> None:
        super().__init__()
        self.eyes = MeanTower()
        self.config = self.eyes.config


class MeanProgram:
    """See `RegionProgram`."""

    name = "mean_encoder"

    def __init__(self, model, kernels):
        self.model, self.kernels = model, kernels

    def modules(self):
        return (self.model,)

    def input_specs(self, bucket):
        return {"images": TensorSpec((bucket.tokens // PATCHES, PATCHES, WIDTH), torch.float32)}

    def size(self, batch):
        return batch.tokens

    def refuse(self, batch, bucket):
        return None

    def load(self, buffers, batch):
        write_rows(buffers["images"], batch.pixels)

    def load_example(self, buffers, bucket):
        buffers["images"].zero_()

    def forward(self, buffers, bucket):
        return (type(self.model).forward(self.model, buffers["images"]),)

    def recording(self):
        return self.kernels(self.modules())

    def output_rows(self, batch):
        return (batch.frames,)

    def differentiable_inputs(self, batch):
        return ()


class MeanAdapter:
    """See `EncoderAdapter`."""

    unit, unit_of, deterministic_tokens = PATCHES, "one image", math.inf

    def __init__(self, model):
        self.model = model

    def read(self, grids, images):
        misfit = None if len(images) else "there is no image"
        return encoder_call(ImageBatch(images, PATCHES), usual=True, misfit=misfit)

    def run(self, forward, batch):
        return forward(batch.pixels)

    def outputs(self, returned):
        return (returned,)

    def returned(self, outputs):
        return outputs[0]

    def bounds(self, capacity, frames, directly):
        return [()]

    def program(self, exact_below, kernels):
        return MeanProgram(self.model, kernels)


def find(holder):
    eyes = getattr(holder, "eyes", holder)
    return eyes if isinstance(eyes, MeanTower) else None


ENCODER = EncoderFamily(name="MeanTower", find=find, adapt=MeanAdapter)
