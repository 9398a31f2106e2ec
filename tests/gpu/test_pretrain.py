"""Bridge's pretrain(), unmodified, with vision graphs; every run is a process of its own."""

import math

import pytest

from tests.gpu.trainings import Training

STRICT = "vision_cuda_graph_strict=true"
BUCKETS = ("vision_cuda_graph_buckets=[2304,4608]", STRICT)
LARGEST = "max_vision_cuda_graph_seq_length=4608"
PLAIN = ("--validate-every", "4", "--text-only-every", "3", "--no-overlap")
EAGER = Training("eager")
OFFLOADED = Training(
    "graphs", (*BUCKETS, "vision_cuda_graph_offload=all", "vision_cuda_graph_recompute=[layernorm,gelu]")
)


@pytest.mark.parametrize(
    "run, fallbacks",
    [
        # Buckets on demand: a size runs eager when it comes first.
        (Training("graphs", ("--validate-every", "4", STRICT, LARGEST), steps=8), {"not_captured_yet"}),
        # Without overlap: Bridge's overlapped reduction, eager too, needs a gradient of every parameter in the last
        # microbatch of a step.
        (Training("graphs", (*PLAIN, *BUCKETS), steps=8), set()),
    ],
    ids=["overlap", "text-only"],
)
def test_evaluation_and_checks(trained, run, fallbacks):
    result = trained(run)
    buckets = result["graphs"]["buckets"].values()
    assert set(result["graphs"]["fallbacks"]) <= fallbacks
    assert sum(b["evaluations"] for b in buckets) > 0
    assert sum(b["replays"] for b in buckets) > 0
    assert len(result["checks"]) >= 1
    assert all(math.isfinite(loss) for loss in result["losses"])
    assert ("eager fallbacks: none" in result["output"]) == (result["graphs"]["fallbacks"] == {})


def assert_losses_equal(graphs, eager):
    assert graphs["graphs"]["replays"] > 0
    assert graphs["losses"][:4] == pytest.approx(eager["losses"][:4], rel=2e-4)
    assert graphs["losses"] == pytest.approx(eager["losses"], rel=5e-3)


def frozen(*parts):
    fields = tuple(f"freeze_vision_{part}=true" for part in parts)
    return Training("eager", fields), Training("graphs", (*BUCKETS, *fields))


@pytest.mark.parametrize(
    "eager, graphs",
    [frozen("model"), frozen("model", "projection"), pytest.param(EAGER, OFFLOADED, marks=pytest.mark.first)],
    ids=["frozen-encoder", "frozen-both", "offloaded"],
)
def test_first_losses_equal_eager(trained, eager, graphs):
    assert_losses_equal(trained(graphs), trained(eager))


def language_model(modules):
    words = ("model.cuda_graph_impl=transformer_engine", f"model.cuda_graph_modules=[{modules}]")
    return Training("graphs", (*BUCKETS, *words))


@pytest.mark.parametrize(
    "eager, graphs",
    [
        pytest.param(EAGER, language_model("attn,mlp"), id="attn-mlp", marks=pytest.mark.first),
        pytest.param(EAGER, language_model(""), id="whole-layer"),
    ],
)
def test_language_model_graphs_beside_vision_graphs(trained, eager, graphs):
    result = trained(graphs)
    assert result["language_model_layers"] == 4
    assert_losses_equal(result, trained(eager))


def whole_language_model(*words):
    return Training("graphs", (*BUCKETS, "model.cuda_graph_impl=full_iteration", *words))


DROPOUT = ("hidden_dropout=0.1", "attention_dropout=0.1")


@pytest.mark.parametrize(
    "eager, graphs, near",
    [
        (EAGER, whole_language_model(), 5e-3),
        pytest.param(Training("eager", PLAIN), whole_language_model(*PLAIN), 5e-3, marks=pytest.mark.first),
        (Training("eager", DROPOUT), whole_language_model(*DROPOUT, "vision_cuda_graph_impl=none"), 5e-2),
    ],
    ids=["overlap", "text-only and evaluation", "dropout, eager encoder"],
)
def test_the_whole_language_model_on_a_graph(trained, eager, graphs, near):
    result, expected = trained(graphs), trained(eager)
    whole = result["language_model_graphs"]
    replays, evaluated = (sum(b[name] for b in whole["buckets"].values()) for name in ("replays", "evaluations"))
    steps = len(result["losses"]) - 3
    assert whole["fallbacks"] == {} and replays == whole["warmup_microbatches"] // 3 * steps
    assert (evaluated > 0) is ("--validate-every" in graphs.words)
    assert bool(result["graphs"]) is ("vision_cuda_graph_impl=none" not in graphs.words)
    if eager.words != DROPOUT:
        assert result["losses"][:4] == pytest.approx(expected["losses"][:4], rel=2e-4)
    assert result["losses"] == pytest.approx(expected["losses"], rel=near)


# Checkpoints take their time by the size of the model.
FEW_WEIGHTS = ("--language-model", "3x1024", *BUCKETS)
SAVED = Training("graphs", ("--save", "{folder}/checkpoint", *FEW_WEIGHTS), steps=4)
RESUMED = Training("graphs", ("--load", "{folder}/checkpoint", *FEW_WEIGHTS), steps=8, after=SAVED)


@pytest.mark.parametrize("resumed, whole", [(RESUMED, Training("graphs", FEW_WEIGHTS, steps=8))], ids=["resumed"])
def test_checkpoint_resume(trained, resumed, whole):
    result = trained(resumed)
    assert len(result["losses"]) == 4
    assert result["graphs"]["replays"] > 0
    assert result["losses"] == pytest.approx(trained(whole)["losses"][4:], rel=5e-3)
