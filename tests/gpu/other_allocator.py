"""A capture in a process whose memory another allocator gives out, for test_capture.py; prints what came of it."""

import json

from bridge_cg_plugin.options import VisionGraphOptions
from bridge_cg_plugin.upstream.hooks.helpers.vision_helper import VisionTECudaGraphHelper
from bridge_cg_tools.benchmarks.models import tower

if __name__ == "__main__":
    tower.start_process()
    model = tower.build_tower(layers=2)
    batch = tower.make_batch([(1, 28, 28)], model)
    before = tower.step(model, batch)
    options = VisionGraphOptions(impl="transformer_engine", buckets=(1024,))
    helper = VisionTECudaGraphHelper(model, model.config, num_microbatches=1, options=options)
    helper.create_cudagraphs()
    goes_on = all(a.equal(b) for a, b in zip(tower.step(model, batch), before, strict=True))
    graphs = helper.graphs
    print(
        json.dumps([helper.graphs_created(), graphs and graphs.failure, goes_on, dict(graphs.statistics().fallbacks)])
    )
