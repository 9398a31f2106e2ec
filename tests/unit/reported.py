"""Runs as reports show them."""

from bridge_cg_plugin.cli.report.runs import GIB, Run
from bridge_cg_plugin.graphs.buckets import Bucket
from bridge_cg_plugin.graphs.fallback import Fallback
from bridge_cg_plugin.graphs.reports import BucketStatistics, RegionStatistics


def statistics():
    found = RegionStatistics(graph_bytes=GIB, static_bytes=GIB // 4, capture_seconds=3.25, warmup_microbatches=12)
    found.buckets[Bucket(1024, (32, 1024))] = BucketStatistics(replays=24, tokens=600, padding=200)
    found.buckets[Bucket(2048, (32, 1024))] = BucketStatistics(replays=3, evaluations=2, tokens=900, padding=100)
    found.buckets[Bucket(4096, (32, 1024))] = BucketStatistics()
    found.step = 7
    for tokens in (5000, 6000, 7000):
        found.fell_back("vision_encoder", Fallback.TOO_MANY_TOKENS, tokens)
    found.fell_back("vision_encoder", Fallback.NO_FREE_SLOT)
    return found


def run(mode, losses=(3.0, 2.0, 1.0), **fields):
    return Run(case="c", mode=mode, losses=tuple(enumerate(losses, 1)), **fields)
