"""The benchmark of other training loops without a GPU: samples, batches, turns, records, what is refused."""

import dataclasses
import hashlib
import importlib.util
import json
import math
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from bridge_cg_plugin.attention_bounds import DETERMINISTIC_TOKENS, frame_limits
from bridge_cg_plugin.cli.runs.results import check_record, provenance, read_records
from bridge_cg_plugin.graphs.planning.buckets import GRANULARITY, Bucket
from bridge_cg_plugin.graphs.planning.demand import BEGIN_WITH, Demand
from bridge_cg_plugin.options import vision_options
from bridge_cg_plugin.upstream.environment import RELEASE_MEMORY
from bridge_cg_plugin.vision.fit import refuse_images
from bridge_cg_plugin.vision.on_demand import menu_of
from bridge_cg_plugin.vision.shape import Shape
from scripts.performance import bench_loops
from scripts.performance.loops import bench, records
from scripts.performance.loops.canary import LEAST_BYTES, Canary
from scripts.performance.loops.ray_stand_in import RayStandIn
from scripts.performance.loops.rounds import FIRST, PASSES, WARM_UP, Counts, Round, rounds_until, timed
from scripts.performance.loops.samples import (
    IMAGE,
    MERGED,
    MIXES,
    PAIR,
    SMALLER_MIXES,
    draw_round,
    microbatches,
)
from scripts.performance.loops.verl_setup import DETERMINISTIC, LORA, PACK_BUCKETS, PLAIN
from scripts.performance.pages.loops_page import loops_parts
from scripts.performance.processes import TrainingFailed

needs_verl = pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed")


# Of the lengths, grids and seeds of a round's samples as records have them.
RECORDED = "059be5a239c7ed33"


def a_round(scale=1.0, captured=0.0, shift=0.0, **fields):
    passes = {
        name: {"ms": scale * ms + 1e3 * captured, "capture_s": captured, "replays": 3, "encoder_ms": scale * 10.0}
        for name, ms in zip(PASSES, (20.0, 30.0, 50.0), strict=True)
    }
    log_probs = {"old": [-1.0 + shift, -2.0], "reference": [-3.0]}
    own = Round(4, log_probs=log_probs, loss=1.0 + shift, grad_norm=2.0).as_dict()
    away = {"away_gb": 1.0, "canary_intact": True, "moved": True, "bit_equal": True}
    return own | away | {"passes": passes} | fields


def a_run(rounds, graphs=(), parts=1):
    return {"rounds": rounds, "graphs": list(graphs), "parts": parts}


GRAPHS = {"capture_seconds": 2.5, "memory_bytes": 3 * 2**30}


ALL_MIXES = pytest.mark.parametrize("mixes", [MIXES, SMALLER_MIXES], ids=["usual", "smaller"])


class TestSamples:
    @ALL_MIXES
    def test_all_mixes_of_a_total_have_as_many_patches_and_pairs_fill_a_bucket(self, mixes):
        for total, each in mixes.items():
            assert {sum(math.prod(grid) for grid in grids) for grids in each} == {total}
            assert PAIR * total % GRANULARITY == 0
        assert all(h % 2 == w % 2 == 0 for each in mixes.values() for grids in each for _, h, w in grids)
        assert max(len(grids) for each in mixes.values() for grids in each) == 3

    @ALL_MIXES
    @pytest.mark.parametrize("number", range(6))
    def test_pairs_fill_a_bucket_and_each_total_is_there(self, number, mixes):
        pairs = microbatches(draw_round(number, 0, mixes))
        assert all(one.patches == other.patches for one, other in pairs)
        assert {one.patches for one, _ in pairs} == set(mixes)

    @ALL_MIXES
    def test_an_image_has_a_placeholder_for_every_embedding(self, mixes):
        for sample in draw_round(1, 0, mixes):
            assert sample.prompt.count(IMAGE) == sample.patches // MERGED
            assert 1 <= len(sample.grids) <= 3
            assert sample.pixels().shape == (sample.patches, 1536)

    def test_usual_samples_are_those_of_the_records(self):
        drawn = [(len(sample.prompt), len(sample.response), sample.grids, sample.seed) for sample in draw_round(1, 0)]
        assert hashlib.sha256(repr(drawn).encode()).hexdigest()[:16] == RECORDED

    def test_rounds_differ_and_come_again_alike(self):
        assert draw_round(2, 0) == draw_round(2, 0) != draw_round(5, 0)
        assert len({len(draw_round(number, 0)) for number in range(3)}) == 3


class TestDeterministicCase:
    def test_each_microbatch_fills_a_bucket_that_deterministic_kernels_take(self, monkeypatch):
        monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
        options = vision_options(DETERMINISTIC.options("plugin"))
        drawn = [draw_round(number, bench.SEED, DETERMINISTIC.mixes) for number in range(20)]
        rounds = [[shape_of(pair) for pair in microbatches(samples)] for samples in drawn]
        demand = demand_of(options)
        for shape in rounds[0] * WARM_UP:
            demand.saw(shape)
        found = demand.begin(BEGIN_WITH)
        for shape in (shape for shapes in rounds for shape in shapes):
            assert shape.tokens in {bucket.tokens for bucket in found if demand._menu.accepts(shape, bucket)}
        assert found and {bucket.tokens for bucket in found} == {PAIR * total for total in SMALLER_MIXES}

    def test_modes_with_graphs_have_its_options_and_other_cases_theirs(self):
        own = {"max_vision_cuda_graph_seq_length", "vision_cuda_graph_tuning"}
        for mode in ("plugin", "plugin_packed"):
            plain, deterministic = PLAIN.options(mode), DETERMINISTIC.options(mode)
            assert {name for name in deterministic if deterministic[name] != plain.get(name)} == own
            assert plain == LORA.options(mode) and plain["max_vision_cuda_graph_seq_length"] == 6144
            assert vision_options(deterministic).gradient_accumulation_fusion is False
        assert not DETERMINISTIC.options("eager1") and not DETERMINISTIC.options("eager_padded")
        assert PLAIN.mixes == LORA.mixes == MIXES

    @pytest.mark.parametrize("setup", [PLAIN, DETERMINISTIC])
    def test_packs_fit_the_largest_bucket_that_the_first_round_needs(self, setup):
        rounds = [
            [
                sum(len(sample.prompt) + len(sample.response) for sample in pair)
                for pair in microbatches(draw_round(number, bench.SEED, setup.mixes))
            ]
            for number in range(20)
        ]
        recorded = min(bucket for bucket in PACK_BUCKETS if bucket >= max(rounds[0]))
        assert max(max(packs) for packs in rounds) <= recorded


def shape_of(pair):
    frames = [math.prod(grid) for sample in pair for grid in sample.grids]
    return Shape(sum(frames), len(frames), max(frames))


def demand_of(options):
    def refuse(shape, bucket):
        return refuse_images(shape, options.exact_below, bucket)

    def buckets_of(capacity, _):
        return [Bucket(capacity, limits) for limits in frame_limits(capacity, options.max_frames)]

    menu = menu_of(options, 4, SimpleNamespace(refuse=refuse), buckets_of)
    return Demand(menu, min(options.max_seq_length, DETERMINISTIC_TOKENS))


class TestCanary:
    def test_a_write_is_found(self):
        canary = Canary([LEAST_BYTES, 100, 2 * LEAST_BYTES], device="cpu")
        assert canary.nbytes == 3 * LEAST_BYTES and canary.intact()
        canary._blocks[1][-1] += 1
        assert not canary.intact()
        canary.release()
        assert canary.nbytes == 0


class TestRounds:
    def test_a_pass_has_what_was_added_meanwhile(self):
        counts = iter([Counts(5, 1.0), Counts(9, 1.5)])
        done = Round(4)
        with timed(done, "old", lambda: next(counts), lambda: None):
            time.sleep(0.01)
        assert (done.passes["old"].replays, done.passes["old"].capture_s) == (4, 0.5)
        assert done.passes["old"].ms >= 10

    def test_late_runs_end_after_one_that_is_timed(self):
        assert list(rounds_until(time.time() - 1, 20)) == [*range(FIRST), FIRST]
        assert list(rounds_until(time.time() + 60, 3)) == [0, 1, 2]


class TestRecords:
    def test_times_are_medians_without_recordings(self):
        rounds = [a_round(9.0), a_round(9.0), a_round(9.0), a_round(1.0), a_round(2.0, captured=0.5), a_round(3.0)]
        found = records.record_of(a_run(rounds))
        assert found["passes_ms"] == pytest.approx({"old": 40.0, "reference": 60.0, "update": 100.0})
        assert found["ms"] == pytest.approx(200.0)
        assert found["encoder_ms"] == pytest.approx(60.0)

    def test_graphs_beside_eager(self):
        eager = [a_run([a_round(2.0, shift=0.01 * n) for _ in range(6)]) for n in range(2)]
        graphs = a_run(
            [a_round(), a_round(), a_round(), a_round(captured=0.25), a_round(shift=0.5), a_round()], [GRAPHS] * 2
        )
        found = records.record_of(graphs, eager)
        assert found["ratio"] == pytest.approx(0.5)
        assert found["pass_ratios"] == pytest.approx(dict.fromkeys(PASSES, 0.5))
        assert found["encoder_ratio"] == pytest.approx(0.5)
        assert (
            found["bit_equal"] is True
            and found["graphs_away_gb"] == 0.0
            and found["log_prob_diff"][4] == pytest.approx(0.5)
        )
        assert found["log_prob_noise"] == pytest.approx([0.01] * 6)
        assert found["inside_spread"] is False
        assert found["recapture_s"] == pytest.approx([0.75, 0.0, 0.0])
        assert found["with_captures_ms"] == pytest.approx(100.0 + 250.0)
        assert found["graph_share"] == pytest.approx(0.75)
        assert (found["capture_s"], found["memory_gb"]) == (5.0, 6.0)
        check_record({"case": "verl", "mode": "plugin", **provenance(5, 0), **found})

    def test_microbatches_that_were_encoded_before_are_told(self):
        run = a_run([a_round()] * 5, [GRAPHS]) | {"kept": 7}
        assert records.record_of(run)["encoded_before"] == 7
        assert "encoded_before" not in records.record_of(run | {"kept": 0})

    def test_every_part_of_a_model_counts(self):
        found = records.record_of(a_run([a_round()] * 5, [GRAPHS] * 2, parts=2))
        assert found["graph_share"] == found["graph_share_moved"] == pytest.approx(0.375)

    def test_a_first_round_that_differs_is_not_equal(self):
        eager = a_run([a_round()] * 3)
        found = records.record_of(a_run([a_round(shift=1e-7)] * 3), [eager], eager)
        assert found["bit_equal"] is False and "inside_spread" not in found

    def test_a_run_is_equal_to_the_eager_run_of_as_many_rows(self):
        eager, padded = a_run([a_round()] * 3), a_run([a_round(shift=1e-2)] * 3)
        found = records.record_of(padded, [eager, padded], padded)
        assert found["bit_equal"] is True and found["log_prob_diff"][0] == pytest.approx(1e-2)

    @pytest.mark.parametrize(("other", "equal"), [({}, True), ({"grad_norm": 2.0 + 1e-7}, False)])
    def test_deterministic_training_is_compared_to_the_bit(self, other, equal):
        eager, padded = a_run([a_round()] * 3), a_run([a_round(loss=1.5)] * 5)
        rounds = [a_round(loss=1.5), a_round(loss=1.5, **other), a_round(loss=1.5)]
        found = records.record_of(a_run(rounds), [eager], padded, deterministic=True)
        assert found["training_equal"] is equal
        assert "training_equal" not in records.record_of(a_run(rounds), [eager], padded)
        check_record({"case": "verl_deterministic", "mode": "plugin_packed", **provenance(3, 0), **found})

    def test_any_round_that_differs_from_eager_passes_over_its_weights_is_not_equal(self):
        rounds = [a_round(bit_equal=number != 4) for number in range(6)]
        assert records.record_of(a_run(rounds))["bit_equal"] is False
        assert records.record_of(a_run(rounds[:4]), [a_run(rounds)])["bit_equal"] is True

    def test_nan_is_a_difference(self):
        assert math.isnan(records.log_prob_differences([a_round(shift=math.nan)], [a_round()])[0])

    def test_other_tokens_are_refused(self):
        other = a_round() | {"log_probs": {"old": [-1.0], "reference": [-3.0]}}
        with pytest.raises(ValueError, match="zip"):
            records.log_prob_differences([a_round()], [other])

    def test_switches(self):
        away = {3: 1.0, 7: 1.25}  # after other rounds the optimizer's state stays
        rounds = [a_round(moved=number > 0, away_gb=away.get(number), canary_intact=number != 5) for number in range(9)]
        found = records.switches(rounds)
        assert found["moves"] == 8 and found["switches"] == 9
        assert found["away_gb"] == 1.25 and found["growth_gb"] == pytest.approx(0.25)
        assert found["canary_intact"] is False

    def test_weights_that_stay_have_no_switches(self):
        assert records.switches([a_round(away_gb=None, canary_intact=None)]) == {}

    def test_shorter_runs_are_compared_as_far_as_they_go(self):
        eager = [[a_round()] * 3, [a_round()] * 5]
        assert records.inside_spread([a_round()] * 4, eager, "loss")


@pytest.fixture
def runs(monkeypatch):
    """Return a function that sets what runs give or raise; the modes that were begun are listed, in order."""
    begun = []

    def give(**by_mode):
        class Process:
            def __init__(self, log, devices, module, environment):
                mode = log.stem.partition("_")[2]
                environments[mode], give.devices[mode] = environment, devices

            def wait_until_ready(self):
                pass

            def train(self, mode, words, limit_s):
                assert time.time() < float(words[words.index("--end") + 1]) <= time.time() + limit_s
                begun.append(mode)
                if isinstance(by_mode[mode], Exception):
                    raise by_mode[mode]
                return by_mode[mode]

            def close(self):
                pass

        monkeypatch.setattr(bench, "TrainingProcess", Process)
        return begun

    environments = give.environments = {}
    give.devices = {}
    return give


class TestBench:
    def test_records_are_written_and_completed(self, runs, tmp_path):
        eager = a_run([a_round(2.0)] * 4)
        begun = runs(eager1=eager, eager2=eager, plugin=a_run([a_round()] * 4, [GRAPHS]), plugin_frozen_outputs=eager)
        out = tmp_path / "loops.jsonl"
        assert bench_loops.main(["--cases", "plain", "--out", str(out), "--seconds", "30"]) == 0
        assert begun == ["eager1", "plugin", "plugin_frozen_outputs", "eager2"]
        found = {record["mode"]: record for record in read_records(out)}
        assert set(found) == set(begun)
        assert found["plugin"]["ratio"] == pytest.approx(0.5) and found["plugin"]["inside_spread"] is True
        assert "ratio" not in found["eager1"] and "inside_spread" not in found["eager2"]

    def test_tables_show_what_differs_from_eager(self, runs, tmp_path):
        eager = a_run([a_round(2.0)] * 4)
        other = a_run([a_round(bit_equal=False, canary_intact=False)] * 4, [GRAPHS])
        runs(eager1=eager, eager2=eager, plugin=a_run([a_round()] * 4, [GRAPHS]), plugin_frozen_outputs=other)
        assert loops_parts(tmp_path) == {"loops": ""}
        assert bench_loops.main(["--cases", "plain", "--out", str(tmp_path / "loops.jsonl"), "--seconds", "30"]) == 0
        lines = loops_parts(tmp_path)["loops"].splitlines()
        (same,) = [
            line for line in lines if "| plain | plugin | 4 | 200 | 100 | **0.50** | 0.50 | 0.50 | 0.50 |" in line
        ]
        assert "log-probabilities bit-equal, losses inside the spread" in same
        assert sum("NOT BIT-EQUAL" in line for line in lines) == 1
        assert sum(line.endswith("| NO |") for line in lines) == 1

    @pytest.mark.parametrize(
        ("shifts", "said"),
        [((0.0, 0.0, 0.0), "OTHER LOSSES"), ((0.0, 0.0, 0.5), "losses outside the spread, as 1 of 3 eager runs")],
    )
    def test_a_run_outside_the_spread_is_judged_as_eager_runs_are(self, shifts, said, tmp_path):
        eager = [a_run([a_round(shift=shift)] * 4) for shift in shifts]
        found = [records.record_of(eager[0]), *(records.record_of(each, eager[:1]) for each in eager[1:])]
        graphs = records.record_of(a_run([a_round(shift=2.0)] * 6, [GRAPHS]), eager)
        modes = [*(f"eager{number}" for number in (1, 2, 3)), "plugin"]
        written = [
            {"case": "verl", "mode": mode, **provenance(4, 0), **each}
            for mode, each in zip(modes, [*found, graphs], strict=True)
        ]
        (tmp_path / "loops.jsonl").write_text("".join(json.dumps(each) + "\n" for each in written))
        assert said in loops_parts(tmp_path)["loops"]

    def test_a_run_that_fails_has_a_record_and_others_go_on(self, runs, tmp_path, capsys):
        eager = a_run([a_round(2.0)] * 4)
        failed = TrainingFailed("it", "all of its log\nRuntimeError: no memory")
        runs(eager1=eager, eager2=eager, plugin=failed, plugin_frozen_outputs=eager)
        out = tmp_path / "loops.jsonl"
        assert bench_loops.main(["--cases", "plain", "--out", str(out), "--seconds", "30"]) == 1
        found = {record["mode"]: record for record in read_records(out)}
        assert "no memory" in found["plugin"]["error"] and "ms" in found["eager2"]
        assert "all of its log" in capsys.readouterr().err

    def test_graphs_of_verl_release_their_memory_and_each_run_has_the_gpu_alone(self, runs, tmp_path):
        written = a_run([a_round()] * 4)
        case = dataclasses.replace(bench.CASES["verl"], needs_files=False)
        begun = runs(**dict.fromkeys(case.modes, written))
        measured = bench.Bench(case, tmp_path, 20, 30.0)
        with measured.started():
            measured.run(None, lambda found: None)
        assert set(runs.devices.values()) == {None}
        assert begun == [*case.modes] and begun[:3] == ["eager1", "plugin_packed", "plugin"]
        assert [mode for mode in begun if runs.environments[mode].get(RELEASE_MEMORY) == "1"] == begun[1:3]

    @pytest.mark.parametrize("name", ["verl", "verl_deterministic"])
    def test_kernels_repeat_to_the_bit_in_all_runs_of_one_case(self, runs, tmp_path, name):
        case = dataclasses.replace(bench.CASES[name], needs_files=False)
        runs(**dict.fromkeys(case.modes, a_run([a_round()] * 4)))
        measured = bench.Bench(case, tmp_path, 20, 30.0, gpus=4)
        with measured.started():
            found = measured.run(None, lambda found: None)
        module = importlib.util.find_spec(case.module)
        assert module is not None and ("deterministic" in module.name) == case.deterministic
        repeats = [environment.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") for environment in runs.environments.values()]
        assert set(repeats) == {"0" if name == "verl_deterministic" else None}
        assert {record["mode"] for record in found if "training_equal" in record} == set(
            case.modes[1:] if name == "verl_deterministic" else ()
        )

    def test_runs_on_several_gpus_go_side_by_side(self, runs, tmp_path):
        case, kept = dataclasses.replace(bench.CASES["verl"], needs_files=False), []
        begun = runs(**dict.fromkeys(case.modes, a_run([a_round()] * 4)))
        measured = bench.Bench(case, tmp_path, 20, 30.0, gpus=4)
        with measured.started():
            found = measured.run(None, kept.append)
        assert [runs.devices[mode] for mode in case.modes] == [[0], [1], [2], [3]] * 2
        assert set(begun[:4]) == set(case.modes[:4]) and set(begun[4:]) == set(case.modes[4:])
        assert [record["mode"] for record in found] == [*case.modes] and found == kept[-1]

    @pytest.mark.parametrize("words", [["--cases", "ver"], ["--cases", "plain", "--rounds", "3"]])
    def test_what_cannot_work_is_refused(self, words, capsys):
        assert bench_loops.main([*words, "--out", "x.jsonl"]) == 2
        assert "Cannot use" in capsys.readouterr().err


class TestVerl:
    def test_what_stands_for_ray_takes_decorators(self):
        ray = RayStandIn()

        @ray.remote
        class Plain:
            pass

        @ray.remote(num_cpus=1)
        def function():
            return 3

        assert isinstance(Plain(), Plain) and function() == 3
        with pytest.raises(AttributeError):
            ray.__wrapped__  # noqa: B018

    @needs_verl
    def test_verl_takes_a_batch_and_its_loss_is_that_of_its_tokens(self):
        code = """
import json, torch
from scripts.performance.loops.samples import draw_round
from scripts.performance.loops.ray_stand_in import stand_in
stand_in()
from scripts.performance.loops import verl_batches, verl_engines
samples = draw_round(0, 0)
batch = verl_batches.batch_of(samples)
ids = batch["input_ids"]
log_probs = torch.nested.nested_tensor_from_jagged(torch.arange(ids.values().numel()).float(), ids.offsets())
output = {"model_output": {"log_probs": log_probs}}
old = verl_batches.response_log_probs(output, batch)
batch = verl_batches.batch_of(samples, old, old)
from verl.utils import tensordict_utils as tu
tu.assign_non_tensor(batch, dp_size=1, batch_num_tokens=batch["loss_mask"].values().sum().item())
loss, _ = verl_engines.loss_function()(model_output=output["model_output"], data=batch)
tokens = [len(s.response) for s in samples]
wanted = -sum(s.advantage * n for s, n in zip(samples, tokens)) / sum(tokens)
rows = [int(row[0]) for row in old.unbind()]
starts = [0, *torch.tensor([len(s.prompt) + len(s.response) for s in samples]).cumsum(0).tolist()]
first = [start + len(s.prompt) - 1 for start, s in zip(starts, samples)]
print(json.dumps([float(loss), wanted, rows == first]))
"""
        written = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
        assert written.returncode == 0, written.stderr[-2000:]
        loss, wanted, aligned = json.loads(written.stdout.splitlines()[-1])
        assert aligned and loss == pytest.approx(wanted, rel=1e-4)

    def test_files_are_a_model(self, tmp_path):
        from transformers import AutoModelForImageTextToText

        from scripts.performance.loops.files import configuration, write_files

        model = AutoModelForImageTextToText.from_pretrained(write_files(tmp_path, configuration(1, 128, 1), 0))
        assert model.config.tie_word_embeddings and len(model.model.visual.blocks) == 1
        assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
