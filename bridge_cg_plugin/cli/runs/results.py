"""Writing measured results as JSON Lines, with what is needed to run them again."""

import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
# Folder of the commands.
COMMANDS = ROOT / "scripts" / "performance"
PACKAGES = ("torch", "transformer-engine", "megatron-core", "megatron-bridge")


def provenance(repeats: int, seed: int) -> dict[str, Any]:
    """Return the fields that say where and how a record was measured."""
    import torch  # takes seconds; a benchmark that trains in other processes starts these first

    return {
        "repeats": repeats,
        "seed": seed,
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "versions": {**{name: _version(name) for name in PACKAGES}, "commit": _commit()},
        "command": command_line(),
    }


def command_line() -> str:
    """Return this process's command line for a record."""
    return "python " + " ".join([os.path.relpath(sys.argv[0], ROOT), *map(_without_folder, sys.argv[1:])])


def write_records(path: Path, records: list[dict[str, Any]]) -> None:
    """Replace the file by these records."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text("".join(json.dumps(record) + "\n" for record in records))
    fresh.replace(path)


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return a file's records; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def measured_by_case(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Return a file's records that measured something, by case and mode."""
    return by_case_and_mode(read_records(path))


def by_case_and_mode(records: Iterable[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return records that measured something, by case and mode."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for record in records:
        if "error" not in record:
            found.setdefault(record["case"], {})[record["mode"]] = record
    return found


# Fields of a record and what their values are; docs/benchmarks/format.md says what they mean.
NUMBER = (int, float)
FIELDS: dict[str, type | tuple[type, ...]] = {
    "case": str,
    "mode": str,
    "tokens": int,
    "images": int,
    "bucket": (int, str, type(None)),
    "slots": int,
    "error": str,
    "wrong": str,
    "ms": (*NUMBER, type(None)),
    "ratio": NUMBER,
    "repeats": int,
    "seed": int,
    "date": str,
    "gpu": str,
    "versions": dict,
    "command": str,
    **dict.fromkeys(("families", "parts_ms", "parts_tflop"), dict),
    "idle_share": NUMBER,
    "idle_gaps": list,
    "gpus": int,
    "kernels": (int, type(None)),
    "top": list,
    "losses": list,
    "grad_norms": list,
    "step_ms": list,
    **dict.fromkeys(("rank_peak_gb", "rank_replays", "rank_fallbacks"), list),
    "ranks_per_gpu": int,
    "token_imbalance": NUMBER,
    "graphs": (dict, type(None)),
    **dict.fromkeys(("audio_graphs", "language_model_graphs", "packed_graphs"), (dict, type(None))),
    **dict.fromkeys(("samples_per_s", "images_per_s", "tokens_per_s", "tflops_per_gpu"), (*NUMBER, type(None))),
    **dict.fromkeys(("fwd_ms", "host_ms", "replay_host_ms", "gpu_busy_ms"), NUMBER),
    **dict.fromkeys(("tflop", "capture_s", "longest_capture_s", "compile_s", "eager_share"), NUMBER),
    **dict.fromkeys(
        ("forward_rel", "forward_noise", "grad_rel", "grad_noise", "loss_rel", "added_share", "padding_share"), NUMBER
    ),
    **dict.fromkeys(("memory_gb", "eager_memory_gb", "peak_gb", "memory_ratio", "memory_target_gb"), NUMBER),
    **dict.fromkeys(("pinned_gb", "copy_ms", "copy_overlap", "limit_gb"), NUMBER),
    **dict.fromkeys(("memory_steps", "rebuild_ms_per_gb"), dict),
    "flat": bool,
    **dict.fromkeys(("replays", "graph_breaks", "language_model_layers", "microbatches", "captured_tokens"), int),
    "encoded_before": int,
    **dict.fromkeys(("fp32_output", "fp32_median", "fp32_mean", "fp32_worst"), NUMBER),
    "fp32_kinds": dict,
    "bit_equal": bool,
    "overlap": bool,
    "inside_spread": (bool, type(None)),
    "training_equal": bool,
    "fallbacks": dict,
    "fallback": (str, type(None)),
    "grad_worst": str,
    "language_model": str,
    "load_ms": NUMBER,
    "load_cpu_ms": NUMBER,
    "added_ms": NUMBER,
    "documents": int,
    "distinct_samples": int,
    "max_packed_seqs": int,
    "predicted_ms": NUMBER,
    **dict.fromkeys(("passes_ms", "pass_ratios"), dict),
    **dict.fromkeys(("log_prob_diff", "log_prob_noise", "recapture_s", "all_graphs"), list),
    **dict.fromkeys(("with_captures_ms", "encoder_ms", "encoder_ratio", "graph_share", "graph_share_moved"), NUMBER),
    **dict.fromkeys(("first_graphed_s", "settled_graph_share"), NUMBER),
    **dict.fromkeys(("away_gb", "graphs_away_gb", "growth_gb"), NUMBER),
    **dict.fromkeys(("switches", "moves"), int),
    "canary_intact": bool,
    "aim": NUMBER,
    "chosen": bool,
}
REQUIRED = ("case", "mode", "repeats", "seed", "date", "gpu", "versions", "command")


def check_record(record: dict[str, Any]) -> None:
    """Make sure that a record is as docs/benchmarks/format.md says.

    Raises:
        ValueError: A field is missing, unknown, or of another type.
    """
    where = f"record {record.get('case')}/{record.get('mode')}"
    missing = [name for name in REQUIRED if name not in record]
    if missing:
        raise ValueError(f"{where}: {', '.join(missing)} missing")
    if not any(name in record for name in ("ms", "forward_rel", "fp32_mean", "error")):
        raise ValueError(f"{where}: neither a measurement (ms, forward_rel, fp32_mean) nor an error")
    for name, value in record.items():
        if name not in FIELDS:
            raise ValueError(f"{where}: unknown field {name!r}; add it to FIELDS and to docs/benchmarks/format.md")
        if not isinstance(value, FIELDS[name]) or (isinstance(value, bool) and bool not in _types(FIELDS[name])):
            raise ValueError(f"{where}: {name}={value!r} is {type(value).__name__}, it must be {FIELDS[name]}")


def _types(allowed: type | tuple[type, ...]) -> tuple[type, ...]:
    return allowed if isinstance(allowed, tuple) else (allowed,)


def put_record(path: Path, record: dict[str, Any]) -> None:
    """Write one record, in place of an earlier one of the same case and mode."""
    check_record(record)
    key = (record["case"], record["mode"])
    kept = [r for r in read_records(path) if (r["case"], r["mode"]) != key]
    write_records(path, [*kept, record])


def put_cases(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write the records of whole cases, in place of all earlier ones of these cases, of whichever modes."""
    for record in records:
        check_record(record)
    cases = {record["case"] for record in records}
    write_records(path, [*(r for r in read_records(path) if r["case"] not in cases), *records])


def loss_distance(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference of matching losses of two runs."""
    return max(abs(one - other) / abs(other) for one, other in zip(losses, expected, strict=True))


def same_steps(runs: Iterable[Sequence[float]]) -> bool:
    """Whether all runs have as many losses; another number of steps is another schedule of learning rates."""
    return len(set(map(len, runs))) == 1


def output_path(given: Path | None, name: str) -> Path:
    """Return where records go: what was given, or docs/benchmarks.

    Raises:
        ValueError: Nothing was given and there is no GPU: such times are for tests and must not replace measured ones.
    """
    if given is not None:
        return given
    import torch

    if not torch.cuda.is_available():
        raise ValueError("Cannot write to docs/benchmarks what is measured without a GPU. Pass --out FILE.")
    return ROOT / "docs/benchmarks" / name


def first_line(error: BaseException) -> str:
    """Return an error's type and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:300]


def _without_folder(argument: str) -> str:
    """Shorten an absolute path to its last part: where a machine keeps its results is nobody's concern."""
    return os.path.basename(argument) if os.path.isabs(argument) else argument


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _commit() -> str:
    given = os.environ.get("BENCHMARK_COMMIT")
    if given:
        return given
    result = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return result.stdout.strip() or "unknown"
