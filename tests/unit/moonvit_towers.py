"""The stand-in for Kimi's remote code, built as Bridge builds it, and the package with its region."""

import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from bridge_cg_plugin.upstream.seams.encoders import GROUP

PACKAGE = Path(__file__).resolve().parents[1] / "packages/moonvit_graphs"
REMOTE_CODE = PACKAGE / "remote_code"
SIDE = 14


def remote(name: str):
    """Return a class of the repository, imported as remote code."""
    return get_class_from_dynamic_module(f"modeling_kimi_k25.{name}", str(REMOTE_CODE), trust_remote_code=True)


def region():
    """Return the module of the package, whose folder is on the path from now on."""
    if str(PACKAGE) not in sys.path:
        sys.path.append(str(PACKAGE))
    return import_module("moonvit_graphs")


def entry_points() -> dict[str, str]:
    """Return the entry points that the package declares."""
    return tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]


def vision_config(**changes):
    """Return the configuration of a small tower."""
    sizes = {
        "patch_size": SIDE,
        **{"vt_hidden_size": 32, "vt_num_attention_heads": 2, "vt_num_hidden_layers": 3, "vt_intermediate_size": 48},
    }
    return SimpleNamespace(**{**sizes, **changes})


def new_moonvit(seed: int = 0, **changes):
    """Build the tower in training mode, with attention peaked as in a trained model."""
    torch.manual_seed(seed)
    tower = remote("MoonViT3dPretrainedModel")(remote("VisionTowerConfig")(vision_config(**changes)))
    peak = 0.3 if tower.config.hidden_size < 100 else 0.05
    with torch.no_grad():
        for block in tower.encoder.blocks:
            block.wqkv.weight.normal_(std=peak)
    return tower.train()


def draw_items(rows, seed: int = 0):
    """Return random patches and the grid for them."""
    grid = torch.tensor(rows)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(int(grid.prod(1).sum()), 3, SIDE, SIDE, generator=generator), grid


def run_moonvit(tower, rows, seed: int = 0):
    """Return the patches of every item."""
    return tower(*draw_items(rows, seed))
