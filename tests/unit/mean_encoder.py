"""What a package beside the plugin brings for an encoder of its own; docs/adding_an_encoder.md shows it."""

import math
from types import SimpleNamespace

import torch
from torch import nn

from bridge_cg_plugin.graphs.program import TensorSpec
from bridge_cg_plugin.graphs.rows import write_rows
from bridge_cg_plugin.vision.adapter import EncoderFamily, encoder_call
from bridge_cg_plugin.vision.batch import ImageBatch

PATCHES, WIDTH = 4, 6  # of one image


class MeanTower(nn.Module):
    """The encoder: embeds images `[images, PATCHES, WIDTH]`."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace()
        self.first, self.second = nn.Linear(WIDTH, 8), nn.Linear(8, 3)

    def forward(self, images):
        return self.second(torch.tanh(self.first(images)).mean(1))


class MeanProgram:
    """The encoder over static buffers; see `RegionProgram`."""

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
        return None  # a batch that has no more tokens than the bucket may use it

    def load(self, buffers, batch):
        write_rows(buffers["images"], batch.pixels)  # zeros behind them

    def load_example(self, buffers, bucket):
        buffers["images"].zero_()

    def forward(self, buffers, bucket):
        return (type(self.model).forward(self.model, buffers["images"]),)

    def recording(self):
        return self.kernels(self.modules())

    def output_rows(self, batch):
        return (batch.shape.frames,)

    def differentiable_inputs(self, batch):
        return ()


class MeanAdapter:
    """Calls and results of the encoder; see `EncoderAdapter`."""

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
