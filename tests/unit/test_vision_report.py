"""What the report and the loggers are told."""

import gc

from bridge_cg_plugin.graphs.fallback import Fallback
from bridge_cg_plugin.graphs.reports.statistics import EagerRun

from .mixes import IMAGES, TOO_MANY_FRAMES, TOO_MANY_TOKENS
from .towers import forward, graphs_on, new_tower


def test_report_names_replays_fallbacks_and_plan():
    model = new_tower()
    with graphs_on(model) as graphs:
        for rows in (IMAGES, IMAGES, TOO_MANY_TOKENS, TOO_MANY_FRAMES):
            forward(model, rows)
            gc.collect()
        text = graphs.report()
    row = next(line for line in text.splitlines() if line.split()[0].startswith("64/16/64"))
    assert row.split()[1] == "2"
    assert "too_many_frames 1" in text and "too_many_tokens 1" in text
    assert "plan: buckets 32, 64, 128, 256 tokens" in text


def test_the_report_says_in_which_step_what_fell_back():
    model = new_tower()
    with graphs_on(model) as graphs:
        for rows in (IMAGES, TOO_MANY_TOKENS):
            with graphs.step():
                forward(model, rows)
        with graphs.step():
            model.eval()
            forward(model, TOO_MANY_TOKENS)
        last = graphs.statistics().last_fallbacks
    size = sum(t * h * w for t, h, w in TOO_MANY_TOKENS)
    assert list(last) == [EagerRun(step, Fallback.TOO_MANY_TOKENS, size) for step in (2, 3)]
