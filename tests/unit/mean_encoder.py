"""What a package beside the plugin brings for an encoder of its own; docs/adding_an_encoder.md shows it."""

from types import SimpleNamespace

import torch
from torch import nn

from bridge_cg_plugin.graphs.program import TensorSpec
from bridge_cg_plugin.graphs.rows import write_rows
from bridge_cg_plugin.vision.batch import equal_images
from bridge_cg_plugin.vision.encoder import Encoder, EncoderFamily, encoder_call

PATCHES, WIDTH = 4, 6  # of one image


class MeanTower(nn.Module):
    """The encoder: embeds images `[images, PATCHES, WIDTH]`."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace()
        self.first, self.second = nn.Linear(WIDTH, 8), nn.Linear(8, 3)

    def forward(self, images):
        return self.second(torch.tanh(self.first(images)).mean(1))


class MeanEncoder(Encoder):
    """The encoder's calls, and the encoder over static buffers."""

    unit, unit_of = PATCHES, "one image"

    def read(self, grids, images):
        misfit = None if len(images) else "there is no image"
        return encoder_call(equal_images(images, len(images), PATCHES), usual=True, misfit=misfit)

    def input_specs(self, bucket):
        return {"images": TensorSpec((bucket.tokens // PATCHES, PATCHES, WIDTH), torch.float32)}

    def load(self, buffers, batch):
        write_rows(buffers["images"], batch.pixels)  # zeros behind them

    def forward(self, buffers, bucket):
        return (type(self.model).forward(self.model, buffers["images"]),)


def find(holder):
    eyes = getattr(holder, "eyes", holder)
    return eyes if isinstance(eyes, MeanTower) else None


ENCODER = EncoderFamily(name="MeanTower", find=find, encoder=MeanEncoder)
