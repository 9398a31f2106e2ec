"""Imports the libraries below the stack, those that take long and leave CUDA alone, for `forks.py`.

Attributes:
    OBSTACLE: Why the process that imported them may not be forked, in words; None where it may.
"""

import importlib
from contextlib import suppress

from .forks import obstacle

LIBRARIES = (
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint",
    "torch.utils.tensorboard",
    "torchvision",
    "transformers",
    "wandb",
    "scipy.stats",
    "networkx",
    "onnx",
    "onnxscript",
    "multistorageclient",
)

for _name in LIBRARIES:
    with suppress(ImportError):  # what it means that one is missing, the stack knows
        importlib.import_module(_name)
OBSTACLE = obstacle()
