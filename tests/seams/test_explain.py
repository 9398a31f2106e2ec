import contextlib
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from megatron.bridge.models.qwen_vl.qwen25_vl_provider import Qwen25VLModelProvider

from bridge_cg_plugin.cli.explain.models import encoder_of
from bridge_cg_plugin.cli.measured import layers_of
from bridge_cg_plugin.cli.runs import train
from bridge_cg_plugin.options import OptionError, normalize
from bridge_cg_plugin.upstream.hooks import recipes
from bridge_cg_plugin.upstream.seams.patches import bridge_release
from bridge_cg_plugin.upstream.seams.seam import NEWEST
from tests.scripts import output
from tests.unit.option_words import told

from ..unit.moonvit_towers import entry_points
from .conftest import SFT
from .explained import explain, found, table

ROOT = Path(__file__).resolve().parents[2]
PRESET = "qwen3_vl_8b_vision_graphs_h200_sft_config"
KIMI, GEMMA4, EXPERTS, WAN, FLUX = (
    *("kimi_k25_vl_sft_config", "gemma4_vl_26b_sft_config"),
    *("qwen3_30b_a3b_sft_config", "wan_1_3b_pretrain_config", "flux_12b_pretrain_config"),
)
EAGER_LAYERS = [f"model.recompute_{name}=null" for name in ("granularity", "method", "num_layers")]
ASKED = {
    GEMMA4: [],
    EXPERTS: ["model.moe_router_fusion=true", "model.expert_model_parallel_size=2", "cuda_graphs=exact"],
    KIMI: ["vision_cuda_graph_impl=transformer_engine", *EAGER_LAYERS],
    WAN: ["cuda_graphs=fastest"],
    FLUX: ["cuda_graphs=exact"],
}
_VERL = "actor_rollout_ref.actor.megatron"
LOOPS = {
    "verl": [
        *(f"++{_VERL}.override_transformer_config.cuda_graphs=exact", f"{_VERL}.tensor_model_parallel_size=4"),
        *(f"{_VERL}.context_parallel_size=2", f"{_VERL}.vanilla_mbridge=False"),
        *("data.train_batch_size=512", "trainer.nnodes=2", "trainer.n_gpus_per_node=8"),
    ],
    "NeMo-RL": [
        *("policy.megatron_cfg.cuda_graphs=exact", "policy.megatron_cfg.tensor_model_parallel_size=4"),
        *("policy.megatron_cfg.context_parallel_size=2", "policy.megatron_cfg.enabled=true"),
        *("grpo.num_prompts_per_step=64", "cluster.num_nodes=2", "cluster.gpus_per_node=8"),
    ],
}
# What a process without PyTorch, hub and GPU makes of recipes: its CPU time for the first, facts, and what is on.
STANDS_IN = """
import contextlib, io, json, os, socket, sys, time
def refuse(*args, **kwargs):
    raise OSError("no network")
socket.getaddrinfo = socket.socket.connect = refuse
from tests.unit.option_words import told
from bridge_cg_plugin.options import OptionError, normalize
from bridge_cg_plugin.recipes import RECIPES
from bridge_cg_plugin.cli.explain import command, recipes, start
from bridge_cg_plugin.cli.explain.models import encoder_of
from bridge_cg_plugin.cli.main import main
from bridge_cg_plugin.cli.measured import NotMeasured, layers_of
def sizes_of(model):
    try:
        return layers_of(model)
    except NotMeasured as why:
        return str(why)
def run(words, variables):
    before = dict(os.environ)
    os.environ.update(variables)
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = main(["explain", *words])
    os.environ.clear()
    os.environ.update(before)
    return status, out.getvalue(), err.getvalue()
preset, asked, starts, posted = sys.argv[1], *map(json.loads, sys.argv[2:])
found = {"facts": {}, "sizes": {}, "refused": {}, "answers": {}}
options = command.look([preset, "optimizer.lr=1e-5"]).options
found["seconds"] = time.process_time()
found["longest"], found["impl"] = options.vision.max_seq_length, options.vision.impl
names = recipes.recipes_of_bridge() | set(RECIPES)
for name in names:
    try:
        command.look([name])
        if name.startswith(("qwen3_vl_", "qwen35_vl_", "qwen3_8b_")):
            written = normalize(recipes.build_recipe(name))[1]
            found["facts"][name] = told(written.facts), str(encoder_of(written.model))
            found["sizes"][name] = sizes_of(written.model)
    except OptionError as error:
        found["refused"][name] = str(error)
found["asked"] = {}
for name in names:
    with contextlib.suppress(OptionError):
        if not recipes._BENCHMARK.search(name):
            said = command.look([name, "cuda_graphs=exact"]).summary
            found["asked"][name] = said["on graphs"], said["time a step"]
try:
    command.look([preset, "modle.x=4"])
except OptionError as error:
    found["misspelt"] = str(error)
found["summary"] = command.look(["moonlight_16b_sft_config", "cuda_graphs=exact"]).summary
for recipe, words in asked.items():
    status, out, err = run([recipe, "--json", *words], {})
    found["answers"][recipe] = json.loads(out)
found["starts"] = [run(words, variables) for words, variables in starts]
found["posted"] = {
    name: [run([*words, f"cuda_graphs={setting}"], variables) for setting in ("exact", "off")]
    for name, (words, variables) in posted.items()
}
start.compare = lambda seam, *_: ("broken", "it moved") if seam.name == "train_loop_vision" else ("native", "")
start._drift.cache_clear()
found["broken"] = [run([preset, *words], {}) for words in ([], ["cuda_graphs=off"])]
found["torch"] = hasattr(sys.modules["torch"], "__stand_in__")
print(json.dumps(found))
"""
# What training refuses, too: upstream's own words, a tracker that these recipes set, layers that do not divide.
RIGHTLY = (
    r"NotImplementedError: PEFT is not currently supported for Qwen3-Next",
    r"rng\.te_rng_tracker=False: it must be true with cuda_graph_impl=transformer_engine",
    r"pipeline_model_parallel_size must be a divisor of model\.num_layers=94, not 16",
    r"Bridge refuses it\. micro_batch_size should be greater than 1 when using enable_in_batch_packing=True",
    r"Bridge refuses it\. Please ensure sequence length configuration in model config and dataset config match",
    r"Bridge refuses it\. Megatron-FSDP requires the fsdp_dtensor checkpointing format",
    r"Bridge refuses it\. load_kwargs\.data_files must contain non-empty paths",
)
POSTED = Path(__file__).with_name("posted_layouts.txt")
# Experts of many ranks, of which 24 layers at once run again.
EAGER_FOR_RECOMPUTE = {"bridge_q3omni"}
ON, SMALL = "cuda_graphs=exact", "qwen3_vl_small_vision_graphs_pretrain_mock_config"
# Command lines that training refuses once it has built a recipe, and variables beside them.
STARTS = (
    ([SFT, ON, "train.micro_batch_size=1"], {}),
    ([SFT, ON, "model.seq_length=1024"], {}),
    ([SFT, ON, "model.context_parallel_size=2"], {}),
    ([SFT, "ddp.use_megatron_fsdp=true"], {}),
    ([SMALL], {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    ([SFT, ON], {"BRIDGE_CG_PLUGIN": "0"}),
    ([SFT, "--nodes", "2", "--gpus_per_node", "8", "model.pipeline_model_parallel_size=3"], {}),
    ([SFT, "cuda_graph_impl=transformer_engine"], {}),
    ([SMALL, "model.recompute_granularity=full"], {}),
    ([SMALL, "model.tensor_model_parallel_size=7"], {}),
)


def posted_layouts():
    """Return command lines of `explain`, and variables beside them, by name."""
    found = {}
    for line in POSTED.read_text().splitlines()[2:]:
        name, variables, recipe, counts, words = line.split(" | ")
        nodes, gpus = counts.split()
        given = [recipe, "--nodes", nodes, "--gpus_per_node", gpus, *words.split()]
        found[name] = given, dict(each.split("=", 1) for each in variables.split() if each != "-")
    return found


newest = pytest.mark.skipif(bridge_release() != NEWEST.bridge, reason="the process has the newest release")


@pytest.fixture(scope="module")
def stands_in(tmp_path_factory):
    """Return what the process found; a package with Kimi K2.5's encoder is installed."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "moonvit_graphs-0.1.dist-info").mkdir()
    lines = ["[bridge_cg_plugin.encoders]", *(f"{name} = {value}" for name, value in entry_points().items())]
    (folder / "moonvit_graphs-0.1.dist-info/entry_points.txt").write_text("\n".join(lines))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT)))}
    words = [json.dumps(given) for given in (ASKED, STARTS, posted_layouts())]
    return json.loads(output([sys.executable, "-c", STANDS_IN, PRESET, *words], environment))


def test_one_object_with_a_key_for_each_part(capsys):
    status, out, err = explain(capsys, "--json", "cuda_graph_scope=full_iteration")
    answer = json.loads(out)
    assert (status, err) == (0, "")
    parts = ["encoder", "language_model", "vision", "packed", "chosen", "warnings"]
    assert list(answer) == ["summary", *parts, "table", "nearest", "layout", "notes"]
    assert answer["encoder"] == ""
    assert answer["language_model"] == {"impl": "full_iteration", "modules": [], "inference_scope": "none"}
    assert "write cuda_graph_impl=full_iteration instead" in answer["warnings"][0]


def some_recipe_config():
    print("a recipe that talks")
    model = SimpleNamespace(cuda_graph_impl="none", cuda_graph_scope=["full_iteration"], use_te_rng_tracker=False)
    return SimpleNamespace(model=model, rng=SimpleNamespace(te_rng_tracker=False))


@pytest.fixture
def recipe_of(monkeypatch):
    """Return a function that lets `seen_config` be the only recipe, of a model."""

    def only(model, make=None):
        config = SimpleNamespace(model=model, rng=SimpleNamespace(te_rng_tracker=True))
        module = SimpleNamespace(seen_config=make or (lambda: config))
        monkeypatch.setattr(recipes, "_modules", lambda: iter([module]))
        return "seen_config"

    return only


def test_a_recipe_and_overrides(capsys, recipe_of):
    name = recipe_of(None, some_recipe_config)
    status, out, _ = explain(capsys, "--json", name)
    assert status == 0 and "keeps graphs off" in json.loads(out)["warnings"][0]
    words = ["cuda_graph_impl=transformer_engine", "cuda_graph_modules=attn"]
    status, out, _ = explain(capsys, "--json", name, *words)
    assert status == 0 and json.loads(out)["language_model"]["modules"] == ["attn"]


@pytest.mark.parametrize(
    ("words", "runs", "why"),
    [
        (["vision_cuda_graph_impl=transformer_engine"], "graphs", "captured on demand"),
        ([], "eager", "vision_cuda_graph_impl=none"),
    ],
)
def test_an_audio_encoder_has_a_line(capsys, recipe_of, words, runs, why):
    model = object.__new__(type("Qwen3OmniModelProvider", (Qwen25VLModelProvider,), {}))
    model.cuda_graph_impl = "none"
    line = table(capsys, recipe_of(model), *words)["audio encoder"]
    assert line["runs"] == runs and line["why"].endswith(why)


class PaintingModelProvider:
    vision_config = None


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Qwen25VLModelProvider, "Qwen2.5-VL's, with an adapter for vision graphs"),
        (type("OwnProvider", (Qwen25VLModelProvider,), {}), "Qwen2.5-VL's, with an adapter for vision graphs"),
        (PaintingModelProvider, "of PaintingModelProvider, without an adapter for vision graphs: it runs eager; docs/"),
        (type("Unknown", (), {"freeze_vision_model": True}), "of a kind that only the hub tells; docs/"),
    ],
)
def test_the_encoder_of_a_recipe_is_named(capsys, recipe_of, kind, said):
    model = object.__new__(kind)
    model.cuda_graph_impl = "none"
    status, out, err = explain(capsys, recipe_of(model), "--details")
    assert status == 0, err
    assert f"vision encoder: {said}" in " ".join(out.split())
    assert found(capsys, "seen_config")["encoder"].startswith(said)


@newest
def test_a_process_without_bridge_answers_for_models_that_only_the_hub_describes(stands_in):
    answers = stands_in["answers"]
    first = {recipe: answer["table"][0] for recipe, answer in answers.items()}
    assert answers[GEMMA4]["encoder"].startswith("of Gemma4VLModelProvider, without an adapter for vision graphs: it")
    assert (first[GEMMA4]["runs"], first[GEMMA4]["why"]) == ("eager", "no adapter for it is known")
    last = answers[EXPERTS]["table"][1]  # a router's loss that only the conversion sets
    assert last["part"] == "language model" and "(model.moe_router_fusion=True: it must be false" in last["why"]
    assert answers[KIMI]["encoder"].startswith("of KimiK25VLModelProvider, with an adapter of another package for ")
    assert first[KIMI]["runs"] == "graphs" and first[WAN]["runs"] == "none"
    of_diffusion = [answers[recipe]["table"][1] for recipe in (WAN, FLUX)]
    assert [part["runs"] for part in of_diffusion] == ["eager", "not known"]
    assert "no graphs of such layers were tried" in of_diffusion[0]["why"]
    assert "built by code that is not run here" in of_diffusion[1]["why"]


@newest
def test_a_recipe_as_bridge_ships_it_is_refused_only_where_training_refuses_it(stands_in):
    refused = stands_in["refused"]
    assert {name: why for name, why in refused.items() if not any(re.search(right, why) for right in RIGHTLY)} == {}


@newest
@pytest.mark.parametrize("number", range(len(STARTS)))
def test_what_bridge_refuses_is_refused_in_the_words_of_training(
    bridge, stands_in, number, capsys, monkeypatch, tmp_path
):
    words, variables = STARTS[number]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    checkpoint = f"checkpoint.pretrained_checkpoint={tmp_path}"
    assert train.main(["--recipe", *words, checkpoint, "--dry-run"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]  # after what graphs come to
    assert said.startswith("Cannot ") and stands_in["starts"][number] == [2, "", f"{said}\n"]
    assert explain(capsys, *words) == (2, "", f"{said}\n")


@newest
def test_posted_layouts_start_where_eager_does_and_none_runs_eager_for_recompute(stands_in):
    on_graphs = []
    for name, ((status, out, err), (eager, _, refused)) in stands_in["posted"].items():
        first = " ".join(out.partition("time a step:")[0].split())
        assert (status, err) == (eager, refused), name
        assert "recompute_granularity" not in first or name in EAGER_FOR_RECOMPUTE, first
        on_graphs += [name] * (status == 0 and not first.startswith("on graphs: nothing"))
        assert status or name in on_graphs or "parameters" in first, first
    assert len(on_graphs) == 13


@pytest.mark.parametrize("loop", LOOPS)
def test_words_of_other_loops_are_taken(capsys, sft, loop):
    status, out, err = explain(capsys, sft, *LOOPS[loop])
    assert status == 0, err
    text = " ".join(out.split())
    assert text.startswith("on graphs: vision encoder, language model time a step: ")
    assert (
        "16 GPUs: model.tensor_model_parallel_size=4, model.context_parallel_size=2, 2 data-parallel replicas" in text
    )
    left = [word.partition("=")[0] for word in LOOPS[loop] if word.startswith(("data.", "grpo."))]
    assert "say nothing of graphs" in text and left[0] in text
    assert "packed" in table(capsys, sft, *LOOPS[loop])["language model"]["why"]
    whole = LOOPS[loop][0].replace("cuda_graphs=exact", "cuda_graph_impl=full_iteration")
    for recipe in ([sft], []):
        assert "Only Bridge's own loop drives such graphs" in explain(capsys, *recipe, whole)[2]
    misspelt = LOOPS[loop][0].replace("cuda_graphs", "cuda_grphs")
    assert "Did you mean model.cuda_graphs?" in explain(capsys, sft, misspelt)[2]


@newest
def test_every_recipe_with_graphs_names_the_nearest_that_was_measured(stands_in):
    assert len(stands_in["asked"]) > 250
    known = "Nearest: |^[0-9]+ ms on"
    unnamed = {name: said for name, said in stands_in["asked"].items() if not re.search(known, said[1])}
    open_ones = {
        name for name, said in unnamed.items() if "not known" in said[0] or not said[0].startswith("nothing; ")
    }
    assert all(name.startswith("flux_") for name in open_ones)  # of diffusion, whose layers no record is of
    assert {unnamed[name][1] for name in unnamed.keys() - open_ones} == {"eager's"}


# What the documentation says of a language model, and what `explain` does.
DOCUMENTED = {
    "packs": r"language model\.$",
    "layers": r"(language model\.$|all layers as one region by the plugin)",
    "routers": "attention and the MoE router of every layer, each a region by the plugin",
    "routers, Mamba": "attention, the MoE router and Mamba layers of every layer, each a region by the plugin",
    "eager or not known": "language model (eager|not known)",
    "": "Bridge refuses it",
}


@newest
def test_every_recipe_of_a_model_with_images_is_documented(stands_in):
    said = {name: answer for name, (answer, _) in stands_in["asked"].items()} | stands_in["refused"]
    pages = (ROOT / "docs/recipes.md").read_text().partition("## Recipes\n")[2].split("## Other recipes\n")
    models, others = (re.findall(r"^\| (`.*) \| (.*) \| (.*?) ?\|$", page, re.MULTILINE) for page in pages)
    described = tuple(row[0].partition("` ")[0].strip("`") for row in models)
    rest = {name for name in said if re.search("_vl_|_omni_|45v_", name) and "_vision_graphs_" not in name}
    rest -= {name for name in rest if name.startswith(described)}
    for names, encoder, language_model in others:
        pattern = "|".join(names.replace("`", "").split(", "))
        pattern = re.sub("{(.*?)}", lambda match: f"({match[1].replace(',', '|')})", pattern).replace("*", ".*")
        found = {name for name in said if re.fullmatch(pattern, name)}
        assert found, names
        rest -= found
        for name in found:
            assert re.search(DOCUMENTED[language_model], said[name].partition(". ")[0] + "."), (name, said[name])
            assert encoder[:6] != "graphs" or said[name].startswith("vision encoder"), said[name]
    assert not rest


@newest
def test_a_broken_seam_refuses_what_asks_for_its_feature_only(stands_in):
    (status, out, err), (without, *_) = stands_in["broken"]
    assert (status, out, without) == (2, "", 0)
    assert "vision_cuda_graph_impl=transformer_engine needs vision graphs" in err and "it moved" in err


def test_graphs_that_are_off_would_bring_most_when_on(capsys, sft):
    status, out, err = explain(capsys, sft, "cuda_graphs=off")
    text = " ".join(out.split())
    assert (
        "language model eager: cuda_graphs=off" in text and "would bring most: cuda_graphs=exact: not measured" in text
    )


def test_graphs_on_a_recipe(capsys, sft):
    words = [sft, "--graphs", "h200", "--vision-cuda-graph-slots", "2", "--vision_cuda_graph_kernels=exact"]
    line = table(capsys, *words, "model.vision_cuda_graph_strict=true")["vision encoder"]
    assert line["why"].endswith("up to 16384 tokens; cuda_graphs=exact")
    tuned = {"vision_cuda_graph_slots=2", "vision_cuda_graph_kernels=exact"}
    assert set(line["options"]) == {"vision_cuda_graph_strict=True", *tuned}


@newest
def test_a_process_without_pytorch_hub_and_gpu_answers_at_once_as_bridge_builds(stands_in, bridge):
    assert stands_in["torch"] and (stands_in["impl"], stands_in["longest"]) == ("transformer_engine", 16384)
    assert "modle" in stands_in["misspelt"]
    unknown = stands_in["summary"]
    assert unknown["on graphs"].startswith(
        "nothing; language model not known: the sizes of moonshotai/Moonlight-16B-A3B"
    )
    assert "unknown model.num_layers" in unknown["time a step"]
    assert stands_in["seconds"] < 3
    for name, captured in (("qwen3_vl_30b_a3b", "attention and the MoE router"), ("qwen35_vl_9b", "all layers as one")):
        said, _ = stands_in["asked"][f"{name}_sft_config"]
        assert said.startswith(f"vision encoder, language model in part ({captured}"), said
    compared = 0
    for name in stands_in["facts"].keys() & set(dir(bridge)):
        said = stands_in["facts"][name]
        with contextlib.suppress(KeyError):  # the tests have no configuration of its model
            written = normalize(getattr(bridge, name)())[1]
            assert said == [told(written.facts), str(encoder_of(written.model))], name
            if "layers of" in stands_in["sizes"][name]:
                assert stands_in["sizes"][name] == layers_of(written.model)
            compared += 1
    assert compared > 10


@pytest.mark.parametrize(
    "words, said",
    [
        (["vision_cuda_graph_impl=transformer_engine"], "rng.te_rng_tracker=true is missing"),
        (["vision_cuda_graph_scope=attn"], "vision_cuda_graph_scope=attn: no effect, vision graphs are off"),
        (["cuda_graph_packed_strict=true"], "no effect, packed-sequence graphs are off"),
    ],
)
def test_what_is_missing_or_has_no_effect_is_said(capsys, words, said):
    status, out, _ = explain(capsys, *words)
    assert status == 0 and f"warning: {said}" in " ".join(out.split()).replace("cuda_graph_packed_strict=true: ", "")


BROKEN = r"Cannot import megatron\.bridge\.recipes: .*bridge-cg doctor"


@pytest.mark.parametrize(
    "error, said",
    [
        (lambda name: OSError("libcudnn.so.9: cannot open"), BROKEN),
        (lambda name: ModuleNotFoundError("no", name="einops"), BROKEN),
        (lambda name: ModuleNotFoundError("a release lacks it", name=name.rpartition(".")[0]), "no such recipe"),
    ],
)
def test_packages_of_recipes_that_do_not_import_are_named(monkeypatch, error, said):
    def broken(name):
        raise error(name)

    monkeypatch.setattr(recipes.importlib, "import_module", broken)
    with pytest.raises(OptionError, match=said):
        recipes.build_recipe("some_recipe_config")


NO_HUB = (
    "its Hugging Face configuration is not cached, and the hub cannot be reached. "
    "`bridge-cg explain seen_config` answers without it."
)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ValueError("Failed to load configuration from Qwen/Qwen3-VL-8B-Instruct after 4 attempts. This ..."), NO_HUB),
        (OSError("We couldn't connect to 'https://huggingface.co' to load the files.\nCheck your ..."), NO_HUB),
        (OSError("no network"), "it stopped with OSError: no network."),
    ],
)
def test_a_recipe_that_does_not_build(recipe_of, error, why):
    def hub_config():
        raise error

    with pytest.raises(OptionError) as refused:
        recipes.build_recipe(recipe_of(None, hub_config))
    assert str(refused.value) == f"Cannot build recipe seen_config: {why}"
