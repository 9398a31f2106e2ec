"""Bridge's pretrain() over two and four ranks, eager and with vision graphs; with fewer GPUs two share each."""

import math
from dataclasses import replace

import pytest

from examples.photographs.arguments import layout_in
from examples.photographs.processes import TrainingFailed
from tests.gpu.trainings import Training

SMALL = ("--global-batch", "8", "--loader-workers", "0")
# What a microbatch does must depend on no clock here.
BUCKETS = ("vision_cuda_graph_buckets=[2304,4608]", "vision_cuda_graph_strict=true")
WARMUP_STEPS = 3
DP2 = ("--data-parallel", "2")
NARROW = ("--language-model", "4x1024")  # ranks of other hosts, for NCCL, reduce over sockets
TP2, PP2, CP2 = ("--tensor-parallel", "2"), ("--pipeline-parallel", "2"), ("--context-parallel", "2")
INTERLEAVED = (*PP2, "--pipeline-chunks", "2", "--language-model", "8x2048")
LAYOUTS = {
    "DP2": DP2,
    "TP2": TP2,
    "PP2": PP2,
    "PP2VP2": INTERLEAVED,
    "CP2": CP2,
    "CP2, images split": (*CP2, "vision_dp_when_cp=true", "--no-overlap"),  # a rank may have no image
    "TP2xPP2": (*TP2, *PP2, *NARROW),
}


def eager(*words):
    own = [word for word in words if not word.startswith("vision_cuda_graph_")]  # runs that are equal are run once
    return Training("eager", (*SMALL, *own))


def graphs(*words):
    return Training("graphs", (*SMALL, *BUCKETS, *words))


def encoders(result, run):
    """Return the graphs' statistics of the ranks that have an encoder, after a look at the others."""
    layout = layout_in(run.words)
    ranks = result["ranks"]
    first = len(ranks) // layout.pipeline
    assert [rank["graphs"] for rank in ranks[first:]] == [None] * (len(ranks) - first)
    return [rank["graphs"] for rank in ranks[:first]]


def assert_same(result, other):
    assert result["losses"] == pytest.approx(other["losses"], rel=5e-3)
    assert result["grad_norms"] == pytest.approx(other["grad_norms"], rel=5e-2)


@pytest.mark.parametrize(
    "expected, run", [(eager(*words), graphs(*words)) for words in LAYOUTS.values()], ids=LAYOUTS.keys()
)
def test_every_microbatch_after_warmup_replays_and_equals_eager(trained, expected, run):
    result, other = trained(run), trained(expected)
    assert all(math.isfinite(value) for value in (*other["losses"], *other["grad_norms"]))
    assert result["losses"][: WARMUP_STEPS + 1] == pytest.approx(other["losses"][: WARMUP_STEPS + 1], rel=2e-4)
    assert_same(result, other)
    layout, found = layout_in(run.words), encoders(result, run)
    assert all(graph["fallbacks"] == {} for graph in found)
    if "vision_dp_when_cp=true" not in run.words:
        replays = (run.steps - WARMUP_STEPS) * 8 // layout.data
        assert [graph["replays"] for graph in found] == [replays] * len(found)
    assert min(graph["replays"] for graph in found) > 0
    if layout.tensor > 1:
        counts = [
            {bucket: (c["replays"], c["tokens"], c["padding"]) for bucket, c in graph["buckets"].items()}
            for graph in found
        ]
        assert len(counts) == layout.tensor and all(count == counts[0] for count in counts)


LANGUAGE_MODEL = ("model.cuda_graph_impl=transformer_engine", "model.cuda_graph_modules=[attn,mlp]")


@pytest.mark.parametrize("expected, run", [(eager(*PP2), graphs(*PP2, *LANGUAGE_MODEL))], ids=["PP2"])
def test_layers_of_both_stages_are_on_graphs_beside_the_encoder(trained, expected, run):
    result, other = trained(run), trained(expected)
    (found,) = encoders(result, run)
    assert found["fallbacks"] == {} and found["replays"] == 8 * (run.steps - WARMUP_STEPS)
    assert [rank["language_model_layers"] for rank in result["ranks"]] == [3, 1]
    assert_same(result, other)


ONE_BUCKET = tuple(word.replace("[2304,4608]", "[2304]") for word in BUCKETS)


@pytest.mark.parametrize("expected, run", [(eager(*DP2), Training("graphs", (*SMALL, *ONE_BUCKET, *DP2)))], ids=["DP2"])
def test_one_rank_may_replay_what_another_runs_eager(trained, expected, run):
    """Gathers and reductions of both go over one communicator, in one order."""
    result, other = trained(run), trained(expected)
    found = encoders(result, run)
    assert all(graph["replays"] > 0 and graph["fallbacks"].keys() == {"too_many_tokens"} for graph in found)
    assert_same(result, other)


# Buckets that a run chooses itself: the first step shows some of the sizes, the nine after it the others.
AUTOMATIC = (*BUCKETS[1:], "cuda_graph_warmup_steps=1")
AUTOMATIC_STEPS, EVALUATED = 10, ("--validate-every", "4")
GROWING = {"DP2": DP2, "TP2": TP2, "PP2, evaluated": (*PP2, *EVALUATED)}


def on_demand(words):
    """Return an eager run and one whose buckets appear while it trains."""
    plain = Training("eager", (*SMALL, *words), steps=AUTOMATIC_STEPS)
    return plain, Training("graphs", (*SMALL, *AUTOMATIC, *words), steps=AUTOMATIC_STEPS)


@pytest.mark.parametrize("expected, run", [on_demand(words) for words in GROWING.values()], ids=GROWING.keys())
def test_buckets_that_appear_while_training_runs(trained, expected, run):
    result, other = trained(run), trained(expected)
    assert_same(result, other)
    found = encoders(result, run)
    for graph in found:
        print(graph["buckets"].keys(), graph["fallbacks"], graph["pause_seconds"])
        assert set(graph["fallbacks"]) <= {"not_captured_yet"}
        assert graph["replays"] > sum(graph["fallbacks"].values())
    assert max(graph["pause_seconds"] for graph in found) > 0, "no bucket appeared after the capture"
    if "--tensor-parallel" in run.words:
        assert len({tuple(graph["buckets"]) for graph in found}) == 1
    evaluations = sum(bucket["evaluations"] for graph in found for bucket in graph["buckets"].values())
    assert (evaluations > 0) is ("--validate-every" in run.words)
    assert result["evaluations"] == pytest.approx(other["evaluations"], rel=5e-3)
    assert bool(result["evaluations"]) is ("--validate-every" in run.words)


FAULTS = "tests.gpu.parallel_faults"


def faulty(fault, *words):
    loose = [word.replace("strict=true", "strict=false") for word in BUCKETS]
    return Training("graphs", (*SMALL, *loose, *words), prepare=f"{FAULTS}:{fault}")


STOPPED = Training("graphs", (*SMALL, *BUCKETS, *TP2), steps=8, prepare=f"{FAULTS}:second_rank_stops")


@pytest.mark.parametrize("run", [STOPPED], ids=["TP2"])
def test_a_replay_that_waits_for_a_rank_ends_within_the_time_out(trained, run):
    with pytest.raises(TrainingFailed, match="process 0 of 2 ended with status 124") as caught:
        trained(run)
    stacks, ends, reason = caught.value.written.partition("[rank 0] this rank ends in step 6: ")
    assert ends and "most recent call first" in stacks
    assert reason.startswith("the replay of the") and "has not ended for 30 s" in reason


SOON = (*BUCKETS, "cuda_graph_warmup_steps=1")  # a run that reads a checkpoint warms up and captures again


SAVED_STEPS, ALL_STEPS = 4, 7


def written_and_read(mode):
    """Return a run that writes a checkpoint at one layout, and one that goes on from it at another."""
    own = SOON if mode == "graphs" else ()
    folder = f"{{folder}}/{mode}"
    first = Training(mode, (*SMALL, *own, *DP2, "--save", folder), steps=SAVED_STEPS)
    return first, Training(mode, (*SMALL, *own, *PP2, "--load", folder), steps=ALL_STEPS, after=first)


@pytest.mark.parametrize(
    "runs, eager_runs, whole",
    [(written_and_read("graphs"), written_and_read("eager"), Training("eager", (*SMALL, *DP2), steps=ALL_STEPS))],
    ids=["DP2 to PP2"],
)
def test_a_checkpoint_of_one_layout_is_read_at_another(trained, runs, eager_runs, whole):
    parts = list(map(trained, runs))
    assert [len(part["losses"]) for part in parts] == [SAVED_STEPS, ALL_STEPS - SAVED_STEPS]
    assert parts[0]["losses"] + parts[1]["losses"] == pytest.approx(trained(whole)["losses"], rel=5e-3)
    for part, run, eager_run in zip(parts, runs, eager_runs, strict=True):
        assert_same(part, trained(eager_run))
        replays = (len(part["losses"]) - 1) * 8 // layout_in(run.words).data
        assert all(graph["fallbacks"] == {} and graph["replays"] == replays for graph in encoders(part, run))


@pytest.mark.parametrize(
    "expected, run",
    [
        (eager(*TP2), faulty("second_rank_cannot_capture", *TP2)),
        (eager(*TP2), faulty("second_rank_cannot_warm_up", *TP2)),
    ],
    ids=["capture", "warm-up"],
)
def test_a_rank_that_cannot_capture_makes_its_group_eager(trained, expected, run):
    result = trained(run)
    found = encoders(result, run)
    assert [graph["fallbacks"] for graph in found] == [{"capture_failed": 8 * (run.steps - WARMUP_STEPS)}] * 2
    assert result["losses"] == pytest.approx(trained(expected)["losses"], rel=5e-3)


STALE = replace(graphs(*DP2), prepare=f"{FAULTS}:stale_weights_are_nan")


@pytest.mark.parametrize("stale, run", [(STALE, graphs(*DP2))], ids=["DP2"])
def test_a_replay_reads_no_weight_that_is_not_gathered(trained, stale, run):
    result = trained(stale)
    assert [graph["fallbacks"] for graph in encoders(result, run)] == [{}, {}]
    assert all(math.isfinite(value) for value in (*result["losses"], *result["grad_norms"]))
    assert result["losses"] == pytest.approx(trained(run)["losses"], rel=5e-3)
