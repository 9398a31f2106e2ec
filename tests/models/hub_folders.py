"""Where a cache of Hugging Face's hub that is made here has its files. Imports nothing heavy."""

from pathlib import Path

# Names on the hub, by the model as Bridge's recipe names spell it.
MODELS = {
    "qwen3_vl_8b": "Qwen/Qwen3-VL-8B-Instruct",
    "qwen3_vl_30b_a3b": "Qwen/Qwen3-VL-30B-A3B-Instruct",
    "qwen35_vl_9b": "Qwen/Qwen3.5-9B",
    "qwen25_vl_7b": "Qwen/Qwen2.5-VL-7B-Instruct",
    "gemma3_vl_4b": "google/gemma-3-4b-it",
}
REVISION = "0" * 40


def snapshot_in(folder: Path, name: str) -> Path:
    """Return the folder of the files of a model, by its name on the hub, in a cache."""
    return folder / "hub" / f"models--{name.replace('/', '--')}" / "snapshots" / REVISION


def variables_of(folder: Path) -> dict[str, str]:
    """Return the environment variables that make Hugging Face's libraries use a cache, and nothing else."""
    return {"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(folder / "hub")}
