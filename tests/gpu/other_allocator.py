"""A capture in a process whose memory another allocator gives out, for test_capture.py."""

import json
from collections.abc import Sequence

from bridge_cg_plugin.options import VisionGraphOptions
from bridge_cg_plugin.upstream.hooks.vision_helper import VisionTECudaGraphHelper
from tests.models import tower

from .workers import worker_parser


def train_words(words: Sequence[str]) -> None:
    """Capture, and write what came of it."""
    parser = worker_parser("other_allocator")
    args = parser.parse_args(words)
    tower.start_process()
    model = tower.build_tower(layers=2)
    batch = tower.make_batch([(1, 28, 28)], model)
    before = tower.step(model, batch)
    options = VisionGraphOptions(impl="transformer_engine", buckets=(1024,))
    helper = VisionTECudaGraphHelper(model, model.config, num_microbatches=1, options=options)
    helper.create_cudagraphs()
    goes_on = all(a.equal(b) for a, b in zip(tower.step(model, batch), before, strict=True))
    graphs = helper.graphs
    found = {"created": helper.graphs_created(), "failure": graphs and graphs.failure, "goes_on": goes_on}
    args.out.write_text(json.dumps({**found, "fallbacks": dict(graphs.statistics().fallbacks)}))
