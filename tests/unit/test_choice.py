"""One setting for all graphs: what it comes to by model, data and layout, and what wins over it."""

import importlib.metadata
import re
from types import SimpleNamespace

import pytest

from bridge_cg_plugin.options import LanguageModelGraphOptions, OptionError, graph_options, normalize
from bridge_cg_plugin.options.normalization import _warned
from bridge_cg_plugin.switches import EXPERT_BOUNDS

from .option_words import gemma3, tower_of_hugging_face

DENSE = {"cuda_graphs": "fastest", "recompute_granularity": None, "attention_dropout": 0.0, "hidden_dropout": 0.0}
PACK = {"pack_sequences_in_batch": True}
PACKED = {**DENSE, **PACK}


def chosen(*sources):
    options, _ = normalize(*sources)
    return options, {part.name: part for part in options.chosen}


def test_a_bare_off_in_yaml_which_reads_it_as_false_is_off(tmp_path):
    (tmp_path / "off.yaml").write_text("model:\n  cuda_graphs: off\n  cuda_graph_impl: transformer_engine\n")
    options, _ = chosen(str(tmp_path / "off.yaml"))
    assert options.choice.setting == "off" and not options.enabled


@pytest.mark.parametrize(
    "said",
    [
        "cuda_graph_max_packed_seqs=4",
        "cuda_graph_impl=transformer_engine cuda_graph_max_packed_seqs=4 cuda_graph_modules=attn,mlp",
        "cuda_graph_impl=full_iteration cuda_graph_scope=full",
        "enable_cuda_graph=true",
    ],
)
@pytest.mark.parametrize("model", [{}, SimpleNamespace(cuda_graph_impl="none", **PACKED)], ids=["words", "model"])
@pytest.mark.filterwarnings("ignore::bridge_cg_plugin.options.GraphOptionWarning")
def test_off_needs_nothing_else_to_be_removed(model, said):
    options = graph_options(model, f"cuda_graphs=off {said}")
    assert not options.enabled
    assert options.language_model == LanguageModelGraphOptions() and not options.packed.enabled


DELTA_NETS = {"experimental_attention_variant": "gated_delta_net"}
REGION = "all layers as one region"
PACKED_REGION, PACKED_ROUTERS = (f"{what} over packed sequences" for what in (REGION, "attention and routers"))
ROWS_ROUTERS = "attention and routers over padded sequences"
ROUTERS = "attention, routers and preprocessing of experts"
MOE = {"num_moe_experts": 8}
AGAIN = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
FUSED = {**MOE, "moe_router_fusion": True}


@pytest.mark.parametrize(
    "settings, graphs, why",
    [
        ({"pipeline_model_parallel_size": 4}, REGION, ""),
        ({**MOE, "expert_model_parallel_size": 2}, REGION, ""),
        ({**MOE, "expert_model_parallel_size": 2, **PACK}, PACKED_REGION, ""),
        ({"mtp_num_layers": 1}, REGION, "multi-token prediction runs eager"),
        (
            {**MOE, "expert_model_parallel_size": 8},
            ROWS_ROUTERS,
            "model.expert_model_parallel_size=8: experts of so many ranks take much memory in a graph; "
            "BRIDGE_CG_EXPERT_BOUNDS=1 captures them",
        ),
        (
            {**MOE, "expert_model_parallel_size": 4, **PACK},
            PACKED_ROUTERS,
            "model.expert_model_parallel_size=4: experts of so many ranks take much memory in a graph; "
            "cuda_graph_modules=[] captures them",
        ),
        ({**MOE, "expert_model_parallel_size": 8, **AGAIN}, ROWS_ROUTERS, "model.expert_model_parallel_size=8"),
        (
            {**MOE, "expert_model_parallel_size": 8, **AGAIN, "recompute_num_layers": 2},
            "eager",
            "model.recompute_granularity='full'",
        ),
        ({**MOE, "expert_model_parallel_size": 8, **AGAIN, **PACK}, PACKED_ROUTERS, "model.expert_model_parallel_size"),
        ({**MOE, "expert_tensor_parallel_size": 2}, ROWS_ROUTERS, "model.expert_tensor_parallel_size=2"),
        ({**MOE, "expert_tensor_parallel_size": 2, **PACK}, PACKED_ROUTERS, "model.expert_tensor_parallel_size=2"),
        (
            {**MOE, "moe_router_force_load_balancing": True, **PACK},
            PACKED_ROUTERS,
            "model.moe_router_force_load_balancing=True",
        ),
        ({"moe_router_force_load_balancing": True, **PACK}, PACKED_REGION, ""),
        (
            {
                **FUSED,
                "moe_router_load_balancing_type": ["none", "aux_loss"],
                "moe_aux_loss_coeff": [0.0, 1e-3],
                **PACK,
            },
            PACKED_ROUTERS,
            "model.moe_router_fusion",
        ),
        (
            {**FUSED, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": "0.0"}
            | {"moe_router_force_load_balancing": False, **PACK},
            PACKED_REGION,
            "",
        ),
        ({"context_parallel_size": 2}, "whole layers", "model.context_parallel_size=2"),
        ({"fp8": "hybrid"}, "whole layers", "model.fp8='hybrid'"),
        ({"fp8": "hybrid", "fp8_recipe": "tensorwise", **PACK}, PACKED_REGION, ""),
        ({"recompute_granularity": "full"}, REGION, ""),
        ({"recompute_granularity": "full", **PACK}, PACKED_REGION, ""),
        ({"recompute_granularity": "selective", "recompute_modules": ["mlp"]}, REGION, ""),
        ({"recompute_granularity": "selective", "recompute_modules": ["mlp"], **PACK}, PACKED_REGION, ""),
        ({"multi_latent_attention": True, **PACK}, "eager", "model.multi_latent_attention=True"),
        ({**MOE, "cpu_offloading": True}, "eager", "model.cpu_offloading=True"),
        (DELTA_NETS, REGION, ""),
        ({**DELTA_NETS, **PACK}, PACKED_REGION, ""),
        ({**DELTA_NETS, **PACK, "context_parallel_size": 2}, "eager", "model.context_parallel_size=2"),
        ({"experimental_attention_variant": "dsa", **PACK}, "eager", "no graphs of such layers were tried on a GPU"),
    ],
)
def test_the_language_model_is_one_region_where_it_can_be_and_else_less_with_its_reason(settings, graphs, why):
    fields = {**DENSE, "cuda_graph_impl": "none", "vision_cuda_graph_impl": "none"}
    options, parts = chosen(SimpleNamespace(**{**fields, **settings}))
    part = parts["language model"]
    assert part.graphs == graphs and part.why.startswith(why) and bool(part.why) == bool(why)
    assert options.vision.enabled and options.packed.enabled == ("packed" in graphs)


@pytest.mark.parametrize(
    "make, settings, graphs",
    [
        (tower_of_hugging_face, {}, REGION),
        (gemma3, {}, REGION),
        (tower_of_hugging_face, {**MOE, "expert_model_parallel_size": 4, **AGAIN}, ROWS_ROUTERS),
        (gemma3, {"context_parallel_size": 2}, "eager"),
    ],
)
def test_layers_over_rows_of_a_model_around_another_encoder_are_one_region(make, settings, graphs):
    unpadded = {"vision_cuda_graph_impl": "none", "cuda_graph_impl": "none", "pad_to_max_length": False}
    options, parts = chosen(make(**{**unpadded, **DENSE, **settings}))
    assert parts["language model"].graphs == graphs
    assert options.language_model.impl == ("none" if graphs == "eager" else "full_iteration")


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("given", [None, {}, {"pad_to_max_length": True}], ids=str)
def test_text_of_several_lengths_stays_eager(given, ranks):
    model = SimpleNamespace(cuda_graph_impl="none", pipeline_model_parallel_size=ranks, **DENSE)
    part = chosen(SimpleNamespace(model=model, dataset=SimpleNamespace(dataset_kwargs=given)))[1]["language model"]
    assert part.graphs == ("the whole step" if given else "eager")
    assert given or "Set it in dataset.dataset_kwargs" in part.why


@pytest.mark.parametrize("sharded", ["use_megatron_fsdp", "use_torch_fsdp2"])
@pytest.mark.parametrize("data", [{**DENSE, **MOE}, DENSE, PACKED], ids=["experts", "dense", "packs"])
def test_nothing_is_captured_where_parameters_move(sharded, data):
    options, parts = chosen({**data, sharded: True})
    assert not options.enabled and parts["language model"].why.startswith(f"{sharded}=True: it moves parameters")


def test_experts_of_many_ranks_are_captured_where_their_room_is_bounded(monkeypatch):
    monkeypatch.setenv(EXPERT_BOUNDS, "1")
    part = chosen({**PACKED, "expert_model_parallel_size": 8, "num_moe_experts": 8})[1]["language model"]
    assert "all layers as one region" in part.graphs and not part.why


def test_a_whole_step_with_experts_is_captured_only_where_a_person_asks():
    text = {"cuda_graphs": "exact", "num_moe_experts": 8}
    options, parts = chosen(SimpleNamespace(cuda_graph_impl="none", **text))
    assert parts["language model"].graphs == "attention, routers and preprocessing of experts"
    assert [module.name for module in options.language_model.modules] == ["attn", "moe_router", "moe_preprocess"]
    assert "the host reads the number of tokens of each expert" in parts["language model"].why
    options, _ = chosen(SimpleNamespace(cuda_graph_impl="none", **text), {"cuda_graph_impl": "full_iteration"})
    assert options.language_model.impl == "full_iteration"


@pytest.mark.parametrize("fields", [{"freeze_vision_model": False}, {"vision_cuda_graph_impl": "none"}])
def test_a_whole_step_with_images_is_captured_only_where_a_person_asks(fields):
    kind = type("Gemma4VLModelProvider", (SimpleNamespace,), {"__module__": "megatron.bridge.models.gemma_vl"})
    model = kind(cuda_graph_impl="none", **fields, **DENSE)
    options, parts = chosen(model, fields if "vision_cuda_graph_impl" in fields else {})
    assert options.language_model.impl == "transformer_engine" and parts["language model"].graphs == "whole layers"
    assert "would capture the images of one step" in parts["language model"].why
    assert chosen(model, {"cuda_graph_impl": "full_iteration"})[0].language_model.impl == "full_iteration"


@pytest.mark.parametrize("experts", [{"expert_model_parallel_size": 8}, {"target_modules": "linear_fc1"}])
def test_what_stays_eager_names_what_keeps_even_the_least_of_it_from_graphs(experts):
    settings = {**PACKED, "num_moe_experts": 8, **experts, "recompute_granularity": "full"}
    part = chosen(settings)[1]["language model"]
    assert part.graphs == "eager" and part.why.startswith("model.recompute_granularity='full'")


@pytest.mark.parametrize(
    "held", [{"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn"]}, {"enable_cuda_graph": True}]
)
def test_what_was_set_stays(held):
    options, parts = chosen({**DENSE, **held})
    before, _ = normalize({**held})
    assert options.language_model == before.language_model
    assert parts["language model"].why == "as it was set"


@pytest.mark.parametrize("data", [DENSE, PACKED])
def test_a_number_of_documents_asks_for_packs_and_keeps_nothing_else_from_graphs(data):
    options, parts = chosen({**data, "cuda_graph_max_packed_seqs": 64})
    assert [part.why for part in parts.values()] == ["", ""] and options.packed.max_packed_seqs == 64
    options, parts = chosen({**data, "cuda_graph_max_packed_seqs": 64, "cpu_offloading": True})
    assert options.vision.enabled and not options.packed.enabled and parts["language model"].graphs == "eager"
    graph_options({**data, "cuda_graph_max_packed_seqs": 64, "cpu_offloading": True})


@pytest.mark.parametrize("setting, attention", [("fastest", "flash"), ("exact", "auto")])
def test_the_fastest_kernels_include_flash_attention_where_its_package_is_installed(monkeypatch, setting, attention):
    sources = SimpleNamespace(**DENSE, vision_cuda_graph_impl="none"), f"cuda_graphs={setting}"
    assert chosen(*sources)[0].vision.attention == "auto"
    monkeypatch.setattr(importlib.metadata, "version", {"flash-attn-4": "4.0.0b36"}.__getitem__)
    assert chosen(*sources)[0].vision.attention == attention
    assert chosen(*sources, "vision_cuda_graph_attention=cudnn")[0].vision.attention == "cudnn"


def test_whole_layers_that_a_recipe_names_beside_graphs_that_are_off_stand_in_no_ones_way():
    experts = {**PACKED, "num_moe_experts": 8, "expert_tensor_parallel_size": 8}
    recipe = SimpleNamespace(**experts, cuda_graph_impl="none", cuda_graph_modules="full", cuda_graph_scope="full")
    options, parts = chosen(recipe)
    assert parts["language model"].graphs.startswith("attention and routers")
    assert [module.name for module in options.language_model.modules] == ["attn", "moe_router"]
    _, parts = chosen(recipe, {"cuda_graph_modules": "full"})
    assert parts["language model"].graphs == "eager"


@pytest.mark.parametrize("modules", ["cuda_graph_modules", "cuda_graph_scope"])
def test_modules_of_graphs_that_a_recipe_keeps_off_are_chosen_anew(modules):
    """As in Bridge's recipes of Qwen3.5 with experts, which name routers beside graphs that are off."""
    off = {"cuda_graph_impl": "none", "vision_cuda_graph_impl": "none"}
    recipe = SimpleNamespace(**DENSE, **MOE, **off, **{modules: ["moe_router", "moe_preprocess"]})
    many = SimpleNamespace(**vars(recipe), expert_model_parallel_size=8)
    assert [chosen(each)[1]["language model"].graphs for each in (recipe, many)] == [REGION, ROWS_ROUTERS]
    written, _ = normalize(many, {"cuda_graph_modules": ["moe_router"]})
    assert [module.name for module in written.language_model.modules] == ["moe_router"]


@pytest.mark.parametrize(
    "field, value",
    [("vision_cuda_graph_buckets", [6]), ("max_vision_cuda_graph_seq_length", 6), ("cuda_graph_packed_buckets", [0])],
)
@pytest.mark.parametrize("source", [dict, lambda fields: SimpleNamespace(**fields, vision_cuda_graph_impl="none")])
def test_a_value_that_no_graph_can_have_is_refused(source, field, value):
    with pytest.raises(OptionError, match=field):
        normalize(source({**PACKED, field: value}))


# What LoRA and DoRA take if nobody says otherwise.
LINEAR = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]


def config(peft=None, **changes):
    """Return as much of a Bridge configuration of a dense Qwen3-VL as the warning depends on."""
    fields = {
        "vision_cuda_graph_impl": "transformer_engine",
        "cuda_graph_impl": "none",
        "use_te_rng_tracker": True,
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "num_moe_experts": None,
        "freeze_language_model": False,
        "freeze_vision_model": False,
        "freeze_vision_projection": False,
        "vision_config": SimpleNamespace(deepstack_visual_indexes=[8, 16, 24]),
    }
    model = SimpleNamespace(**{**fields, **changes})
    return SimpleNamespace(model=model, rng=SimpleNamespace(te_rng_tracker=True), peft=peft)


def experts(**changes):
    """Return one with mixture of experts, as Bridge's recipe of the 235B model says it."""
    return config(**{"num_moe_experts": 128, "sequence_parallel": False, **changes})


def adapters(targets=LINEAR, **changes):
    return config(SimpleNamespace(target_modules=targets), **changes)


def warned(*sources):
    _warned.clear()
    return graph_options(*sources).warnings


@pytest.mark.parametrize("make", [config, experts])
def test_what_the_warning_names_takes_it_away(make):
    (text,) = warned(make())
    told = re.search(r"Write (\S+);", text)[1]
    assert warned(make(), [told]) == warned(make(), [f"model.{told}"]) == ()


@pytest.mark.parametrize(
    "change",
    [
        {"vision_cuda_graph_impl": "none"},
        {"tensor_model_parallel_size": 1},
        {"tensor_model_parallel_size": None},
        {"sequence_parallel": None},
        {"vision_config": SimpleNamespace(deepstack_visual_indexes=[])},
        {"vision_config": SimpleNamespace()},  # Qwen3.5-VL's has no such field
        {"freeze_vision_model": True, "freeze_vision_projection": True},
    ],
    ids=str,
)
def test_each_condition_alone_takes_it_away(change):
    assert len(warned(config())) == 1
    assert warned(config(**change)) == ()


def test_adapters_are_in_the_encoder_too_whatever_is_frozen():
    assert len(warned(adapters(freeze_vision_model=True, freeze_vision_projection=True))) == 1
    assert warned(adapters(["language_model.*.linear_qkv"])) == warned(adapters(None)) == ()


def test_recompute_that_trains_the_encoder_wrongly_is_told():
    alone = {"tensor_model_parallel_size": 1, "recompute_granularity": "full"}
    (text,) = warned(config(**alone))
    assert "gives the vision encoder's deepstack features no gradients" in text
    for change in (
        {"vision_cuda_graph_impl": "none"},
        {"recompute_granularity": "selective"},
        {"vision_config": SimpleNamespace(deepstack_visual_indexes=[])},
        {"freeze_vision_model": True, "freeze_vision_projection": True},
    ):
        assert warned(config(**alone | change)) == ()
