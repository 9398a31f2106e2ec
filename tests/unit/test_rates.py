"""The cost model of language models by their sizes: its formula, its rates against the records, what it refuses."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge_cg_plugin.cli.planner.rates import (
    FAR,
    LINEAR_PASSES,
    cost_of,
    language_model_rates,
    measured,
    parameters,
    products,
    scaled,
)
from bridge_cg_plugin.cli.planner.shapes import LanguageModel, NotMeasured, Ranks, language_model_of, ranks_of
from tests.models.language_model import SHAPES, sizes_of

from . import packs

RATES = language_model_rates()
DENSE, EXPERTS, HYBRID = (sizes_of(SHAPES[name]) for name in ("dense", "moe", "mamba"))
MODELS = {"dense": DENSE, "experts": EXPERTS, "hybrid": HYBRID}


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
