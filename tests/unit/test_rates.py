"""The cost model of language models by their sizes: its formula, its rates against the records, what it refuses."""

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge_cg_plugin.cli.planner.plan import place
from bridge_cg_plugin.cli.planner.rates import (
    FAR,
    FILE,
    LINEAR_PASSES,
    amounts,
    cost_of,
    language_model_rates,
    measured,
    parameters,
    products,
    scaled,
)
from bridge_cg_plugin.cli.planner.shapes import LanguageModel, NotMeasured, Ranks, language_model_of, ranks_of
from bridge_cg_plugin.cli.runs.results import read_records
from bridge_cg_plugin.language.packed.fit import pack_buckets
from scripts.performance.models.arithmetic import LanguageModelShape, language_model_flops
from scripts.performance.models.language_model import SHAPES, sizes_of, split
from scripts.performance.packed import rates as fitting
from scripts.performance.packed.bench import SHAPES as bench_shapes
from scripts.performance.packed.observations import Observation, Ran, observations
from scripts.performance.pages.cost_page import fitted
from scripts.performance.pages.results_page import ROOT

from . import packs

RECORDS = ROOT / "docs/benchmarks"
RATES = language_model_rates()
DENSE, EXPERTS, HYBRID = (sizes_of(SHAPES[name]) for name in ("dense", "moe", "mamba"))
MODELS = {"dense": DENSE, "experts": EXPERTS, "hybrid": HYBRID}


def near(found, wanted):
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(near(found[name], wanted[name]) for name in wanted)
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(near, found, wanted))
    return found == (pytest.approx(wanted, rel=1e-3, abs=1e-6) if isinstance(wanted, float) else wanted)


def test_the_package_has_what_the_records_give():
    """Else: python scripts/performance/fit_costs.py."""
    assert near(json.loads(FILE.read_text()), json.loads(fitted(RECORDS)))


def test_the_script_writes_the_file(tmp_path):
    script = ROOT / "scripts/performance/fit_costs.py"
    subprocess.run([sys.executable, script, "--out", tmp_path / "m.json"], check=True, capture_output=True)
    assert near(json.loads((tmp_path / "m.json").read_text()), measured())


def made_up(name, tokens, documents, rates):
    """Return what a model would take by known rates."""
    model, lengths = sizes_of(SHAPES[name]), split(tokens, documents)
    bucket, cost = place(lengths, pack_buckets([tokens], documents)), cost_of(model, Ranks(), rates)
    graphs = cost.graph_ms(tokens, lengths, *bucket.limits)
    return Observation(
        case=f"{name}_{tokens}x{documents}",
        name=name,
        model=model,
        ranks=Ranks(),
        packs=(Ran(lengths, bucket),),
        graphs_ms=graphs,
        memory_gb=cost.memory_gb(tokens),
        eager_ms=cost.eager_ms(lengths),
        busy_ms=rates.eager_busy[model.kind] * graphs,
        records=({"date": "2026-01-01", "gpu": "NVIDIA H200", "versions": {"commit": "0"}},),
    )


@given(st.floats(0.5, 2.0), st.floats(0.5, 2.0), st.floats(0.1, 3.0))
@settings(max_examples=20, deadline=None)
def test_rates_are_found_again(products, traffic, rows):
    """From packs of many shapes, as bench_packed.py --cost-model measures them, that of rows too."""
    ms = {**RATES.ms, "products": products, "bytes": traffic, "rows": rows}
    known = replace(RATES, ms=ms, stall=0.0, eager_busy=dict.fromkeys(MODELS, 1.0))
    names = ("dense", "large", "moe", "mamba")
    found = [made_up(name, *shape, known) for name in names for shape in (*bench_shapes, (2048, 5), (8192, 5))]
    fitted_again = fitting.fit(found)
    for name in (*fitting.ALONE, "rows"):
        assert fitted_again.ms[name] == pytest.approx(ms[name], rel=1e-3, abs=1e-3), name
    for each in found:
        off = fitting._far(each, fitted_again)
        assert max(off.graphs, off.memory) < 1e-3


def test_errors_are_of_records_that_the_fit_has_not_seen(monkeypatch):
    """Records that contradict all others have large errors, although they would be fitted if they were seen."""
    every = observations(RECORDS)
    honest = fitting.errors_of(every)
    strange = [replace(each, graphs_ms=2 * each.graphs_ms) if each.case == "dense_8192" else each for each in every]
    assert fitting.errors_of(strange)["dense"].graphs > 0.3 > honest["dense"].graphs
    for kind in MODELS:
        alone = [each for each in every if not each.ranks.shared and each.model.kind == kind]
        assert honest[kind].records == len(alone) >= 3


def test_rates_are_of_one_kind_of_gpu():
    every = observations(RECORDS)
    assert {record["gpu"] for each in every for record in each.records} == {RATES.gpu}
    recorded = {record["case"]: record["gpu"] for record in read_records(RECORDS / "packed.jsonl")}
    assert set(recorded.values()) > {RATES.gpu}  # else nothing was left out


def test_records_of_one_gpu_are_within_the_errors():
    for each in observations(RECORDS):
        errors = RATES.errors[each.ranks.shared or each.model.kind]
        off = fitting._far(each, RATES)
        assert off.graphs <= errors.graphs + 1e-3, each.case


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=30))
def test_arithmetic_is_that_of_the_benchmarks(lengths):
    shape = LanguageModelShape(layers=16, hidden=2048, queries=2048, keys=1024, mlp=6144, vocabulary=32_768)
    found = amounts(DENSE, Ranks())
    squares = sum(n * n for n in lengths) / 1e6
    counted = found["products"].of(sum(lengths), 0, 0) + found["attention"].of(0, squares, 0)
    assert counted * 1e12 == pytest.approx(language_model_flops(lengths, shape))


def test_parameters_are_those_of_a_model():
    model = packs.new_model()
    held = sum(parameter.numel() for parameter in model.parameters())
    sizes = language_model_of(SimpleNamespace(**{**vars(model.config), "vocab_size": model.vocab_size}))
    assert parameters(sizes, Ranks()) == pytest.approx(held, rel=0.05)


def test_hybrids_are_counted_by_their_pattern():
    assert (HYBRID.mamba, HYBRID.attention, HYBRID.mlps, HYBRID.pieces) == (7, 2, 7, 16)
    assert HYBRID.kind == "hybrid" and not HYBRID.rotary_by_document and HYBRID.inner == 4096
    assert str(HYBRID) == "2 attention, 7 MLP, 7 Mamba layers of 2048"


@pytest.mark.parametrize(("frequency", "layers"), [(1, 16), (2, 8), ([0, 1, 1] + [1] * 13, 15)])
def test_layers_with_experts_are_counted(frequency, layers):
    model = sizes_of(SHAPES["moe"], moe_layer_freq=frequency)
    assert (model.expert_layers, model.mlps, model.attention) == (layers, 16 - layers, 16)


@given(
    st.sampled_from(list(MODELS)),
    st.integers(1, 3),
    st.sampled_from([Ranks(), Ranks(tensor=2), Ranks(tensor=2, sequence=True)]),
    st.lists(st.integers(16, 2000), min_size=1, max_size=20),
)
def test_more_layers_tokens_and_documents_cost_more_and_ranks_share_memory(kind, times, ranks, lengths):
    model = MODELS[kind]
    deeper = replace(
        model,
        attention=model.attention * (times + 1),
        mlps=model.mlps * (times + 1),
        expert_layers=model.expert_layers * (times + 1),
        mamba=model.mamba * (times + 1),
    )
    less, more = cost_of(model, ranks, RATES), cost_of(deeper, ranks, RATES)
    tokens = sum(lengths)
    shallow, deep = (each.graph_ms(tokens, lengths, len(lengths), max(lengths)) for each in (less, more))
    assert shallow < deep <= (times + 1) * shallow
    assert less.eager_ms(lengths) < more.eager_ms(lengths)
    assert less.eager_ms(lengths) <= less.eager_ms([*lengths, 64])
    assert less.graph_ms(tokens, lengths, len(lengths), max(lengths)) < less.graph_ms(
        tokens + 64, lengths, len(lengths), max(lengths)
    )
    alone = cost_of(model, Ranks(), RATES)
    assert less.memory_gb(4096) <= alone.memory_gb(4096) + 1e-9


def test_experts_that_stay_eager_bound_a_replay():
    cost = cost_of(EXPERTS, Ranks(), RATES, whole=False)
    assert cost.graph_ms(2048, [2048], 1, 2048) == pytest.approx(16 * RATES.experts_eager_ms)
    assert cost.memory_gb(4096) > cost_of(EXPERTS, Ranks(), RATES).memory_gb(4096)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"multi_latent_attention": True}, "multi-latent attention was not measured"),
        ({"mtp_num_layers": 1}, "multi-token prediction was not measured"),
        ({"experimental_attention_variant": "gated_delta_net"}, "linear attention was not measured"),
        ({"hidden_size": None}, "model.hidden_size is not known here"),
        ({"hybrid_layer_pattern": "MG*"}, "layers G of hybrid_layer_pattern were not measured"),
        ({"num_moe_experts": 8, "moe_layer_freq": "([1]*8)"}, "which layers have experts is not known"),
    ],
)
def test_sizes_that_no_record_is_like(fields, said):
    with pytest.raises(NotMeasured, match=said.replace("*", r"\*")):
        sizes_of(SHAPES["dense"], **fields)


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (Ranks(tensor=4), "model.tensor_model_parallel_size=4 was not measured"),
        (
            Ranks(tensor=2, context=2),
            "model.tensor_model_parallel_size=2 with model.context_parallel_size=2 was not measured",
        ),
        (Ranks(pipeline=2), "model.pipeline_model_parallel_size=2 was not measured"),
        (Ranks(context=2, exchange="a2a+p2p"), "cp_comm_type=a2a+p2p was not measured"),
    ],
)
def test_layouts_that_no_record_is_of(ranks, said):
    with pytest.raises(NotMeasured) as refused:
        scaled(DENSE, ranks, RATES)
    assert str(refused.value) == said
    assert cost_of(DENSE, ranks, RATES).per_token_ms > 0  # what is known of it


def test_a_model_far_from_all_records():
    layers = int(FAR * RATES.range["layers"][1])
    with pytest.raises(NotMeasured, match="layers are far from the measured"):
        scaled(replace(DENSE, attention=layers, mlps=layers), Ranks(), RATES)
    with pytest.raises(NotMeasured, match="far from the measured"):
        scaled(replace(DENSE, hidden=128, queries=128, keys=64, mlp=256), Ranks(), RATES)
    assert LINEAR_PASSES * products(DENSE, Ranks()) / 1e9 < RATES.range["GFLOP a token"][1]


def test_ranks_are_read_from_a_provider():
    held = SimpleNamespace(context_parallel_size=2, cp_comm_type=["a2a", "a2a"], sequence_parallel=True)
    assert ranks_of(held) == Ranks(context=2, exchange="a2a", sequence=True)
    assert ranks_of(SimpleNamespace()) == Ranks() and Ranks().shared == ""
    assert ranks_of(SimpleNamespace(expert_model_parallel_size=2)).shared == "expert_ranks"


def test_a_full_size_step_is_beside_its_forecast():
    step = next(one for one in measured()["steps"] if (one["case"], one["setting"]) == ("8b_sft_tp2", "exact"))
    model, pack = LanguageModel(**step["model"]), step["pack"]
    assert (model.attention, model.hidden) == (36, 4096)
    assert pack["forecast"]["graphs_ms"] == pytest.approx(pack["graphs_ms"], rel=0.35)
    assert pack["forecast"]["memory_gb"] == pytest.approx(pack["memory_gb"], rel=0.35)
