"""The main job without a GPU: Bridge's vision tower, small and fp32, eager and through the reference executor."""

import contextlib

import torch
from torch import nn
from torch.nn import functional

from bridge_cg_plugin.graphs.recordings.executor import ReferenceExecutor
from bridge_cg_plugin.options import VisionGraphOptions
from bridge_cg_plugin.upstream.hooks.helpers.constructors import encoder_helper
from bridge_cg_plugin.upstream.hooks.helpers.graph_helper import GraphHelper
from examples.photographs.images import FILES, SMALL_SIZES, Images, draw_images
from examples.photographs.small_tower import build_tower

WARMUP_STEPS = 2
MICROBATCHES = 2
TOLERANCE = 1e-4


class Captioner(nn.Module):
    """The tower and a linear head that names each photograph."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = build_tower(seed=0)
        torch.manual_seed(1)
        self.head = nn.Linear(self.tower.config.out_hidden_size, len(FILES))

    def loss(self, images: Images) -> torch.Tensor:
        """Return the mean cross entropy of the photographs' names."""
        embeddings, deepstack = self.tower(images.pixels, images.grid)
        features = embeddings + sum(deepstack)
        counts = (images.grid.prod(-1) // 4).tolist()
        pooled = torch.stack([part.mean(0) for part in features.split(counts)])
        return functional.cross_entropy(self.head(pooled), torch.tensor([FILES.index(n) for n in images.names]))


def train(graphs: bool, steps: int) -> tuple[list[float], GraphHelper | None]:
    """Train and return the losses of each step; with graphs, the helper as well, still active."""
    model, helper = Captioner(), None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if graphs:
        options = VisionGraphOptions(impl="transformer_engine", max_seq_length=1024, exact_below=0, strict=True)
        helper = encoder_helper(model.tower, model.tower.config, options=options, executor=ReferenceExecutor())
    losses = []
    for step in range(steps):
        if helper is not None and step == WARMUP_STEPS:
            helper.create_cudagraphs()
        optimizer.zero_grad()
        total = 0.0
        for microbatch in range(MICROBATCHES):
            loss = model.loss(draw_images(step * MICROBATCHES + microbatch, 3, SMALL_SIZES)) / MICROBATCHES
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses, helper


def main(steps: int) -> int:
    """Run both, print the comparison, return the exit status."""
    print("No GPU, so no graphs: a small vision tower of Bridge's runs eager, and as recorded for graphs, on the CPU.")
    eager, _ = train(False, steps)
    graphed, helper = train(True, steps)
    print(f"{'step':>4} {'eager':>12} {'recorded':>12} {'difference':>11}")
    worst = 0.0
    for step, (a, b) in enumerate(zip(eager, graphed, strict=True)):
        difference = abs(a - b) / abs(a)
        worst = max(worst, difference)
        print(f"{step:>4} {a:>12.7f} {b:>12.7f} {difference:>11.1e}")
    assert helper is not None and helper.graphs is not None
    statistics = helper.graphs.statistics()
    with contextlib.redirect_stdout(None):  # its report speaks of graphs
        helper.delete_cuda_graphs()
    print(f"replayed {statistics.replays} microbatches, {statistics.padding_share:.0%} of their tokens padding")
    same = worst <= TOLERANCE and statistics.replays == (steps - WARMUP_STEPS) * MICROBATCHES
    print(
        f"verdict: {'SAME' if same else 'DIFFERENT'} (largest relative difference {worst:.1e}, allowed {TOLERANCE:g})"
    )
    return 0 if same else 1
