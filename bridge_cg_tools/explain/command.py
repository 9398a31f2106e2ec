"""The command `bridge-cg explain`."""

import argparse
import difflib
import importlib.util
import io
import json
import logging
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any

import bridge_cg_plugin
from bridge_cg_plugin.options import GraphOptions, OptionError, check_options, facts_of, normalize
from bridge_cg_plugin.options import explain as wording
from bridge_cg_plugin.options.flags import FLAGS, take_flags, unknown_flag
from bridge_cg_plugin.options.groups import split_name, tuning_of
from bridge_cg_plugin.options.sources import (
    ATTRIBUTES,
    FIELDS,
    MODEL_SECTIONS,
    OTHER_FIELDS,
    SETTINGS,
    is_word,
)
from bridge_cg_plugin.recipes import GPUS, with_graphs
from bridge_cg_plugin.upstream.hooks.overrides import check_trackers, resolve
from bridge_cg_plugin.upstream.hooks.recipes import build_recipe
from bridge_cg_plugin.upstream.seams.known_encoders import encoder_of

from ..answers import Tell
from . import models, standins
from .words import set_words

SECTIONS = frozenset(
    {
        *MODEL_SECTIONS,
        *("checkpoint", "comm_overlap", "dataset", "ddp", "dist", "ft", "inprocess_restart", "logger"),
        *("mixed_precision", "nvrx_straggler", "optimizer", "optimizer_config_override_provider", "peft", "profiling"),
        *("rerun_state_machine", "rng", "scheduler", "straggler", "tensor_inspect", "tokenizer", "train", "validation"),
    }
)
_FLAGS = tuple(spelling for flag in FLAGS for spelling in flag.spellings)
_TRACKER = "rng.te_rng_tracker"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("input", nargs="*", help="a recipe's name, a YAML file, name=value or --name value")
    parser.add_argument("--graphs", choices=tuple(GPUS), help="vision graphs within this GPU's limits, on the recipe")


def run(words: Sequence[str], as_object: bool, tell: Tell, gpu: str | None = None) -> int:
    """Print the options that words of a command line resolve to; returns 2 if they are refused, else 0.

    Args:
        words: A recipe's name, and what is written beside it.
        as_object: Whether to print JSON.
        tell: Prints the answer.
        gpu: The GPU of vision graphs that are switched on in the recipe; None leaves the recipe as it is.
    """
    try:
        options, encoder = _answer(words, gpu)
    except (OptionError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    if as_object:
        tell(json.dumps({"encoder": encoder, **wording.as_json(options)}))
    else:
        tell("\n".join([f"vision encoder: {encoder}"] * bool(encoder) + [wording.in_words(options)]))
    return 0


def explain(words: Sequence[str], gpu: str | None = None) -> GraphOptions:
    """Return what words resolve to, checked as training does.

    Args:
        words: See `run`.
        gpu: See `run`.

    Raises:
        OptionError: Training would refuse it, or a word means nothing.
    """
    return _answer(words, gpu)[0]


def _answer(words: Sequence[str], gpu: str | None) -> tuple[GraphOptions, str]:
    """Return what words resolve to, and the vision encoder of their recipe in words; empty without one."""
    recipe = [word for word in words[:1] if not is_word(word)]
    if gpu is not None and not recipe:
        raise OptionError.because("graphs", "Cannot use --graphs without a recipe. Write a recipe's name first.")
    flags, others = take_flags(_in_pairs(words[len(recipe) :]))
    if not recipe:
        return _of_words(flags, others), ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _of_recipe(recipe[0], flags, others, gpu)


def _in_pairs(words: Sequence[str]) -> list[str]:
    """Return words in which a flag has one value, and everything else is `name=value` or a file.

    Raises:
        OptionError: A flag does not exist; names the nearest.
    """
    found: list[str] = []
    left = list(words)
    while left:
        name, assigned, value = left.pop(0).partition("=")
        if not name.startswith("--"):
            found.append(name + assigned + value)
            continue
        if not assigned:
            takes_pairs = bool(tuning_of(name.removeprefix("--").replace("-", "_")))
            values = [left.pop(0)] if left and takes_pairs and not left[0].startswith("--") else []
            while left and not is_word(left[0]):
                values.append(left.pop(0))
            value = ",".join(values) or "true"
        _check_flag(name)
        found += [f"{name}={value}"] if name in _FLAGS else [f"{name.removeprefix('--').replace('-', '_')}={value}"]
    return found


def _of_words(flags: Mapping[str, Any], words: Sequence[str]) -> GraphOptions:
    """Resolve words beside no recipe; what only a recipe would tell is said."""
    for word in words:
        _check_name(word)
    files = [word for word in words if "=" not in word]
    said = [word for word in words if "=" in word]
    check_trackers(said)
    options, written = normalize(files, flags, said)
    facts = facts_of(written)
    check_options(options, facts)
    if (options.enabled or options.packed.enabled) and facts.te_rng_tracker is None:
        missing = f"{_TRACKER}=true is missing: training refuses graphs without it. run_recipe.py and presets set it"
        options = replace(options, warnings=(*options.warnings, missing))
    return options


def _of_recipe(name: str, flags: Mapping[str, Any], words: Sequence[str], gpu: str | None) -> tuple[GraphOptions, str]:
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.bridge") is None:
        why = "megatron-bridge is not installed. Install it (docs/getting_started.md), or write options alone."
        raise OptionError.because("recipe", f"Cannot build recipe {name}: {why}")
    asked = without_imports()
    config = _built(name, asked is not None)
    if gpu is not None:
        config = with_graphs(config, gpu=gpu)
    options = resolved(config, flags, words, asked is not None)
    notes = [
        f"the sizes of {model} are on Hugging Face's hub only: what depends on its experts, dropout or kind of layers "
        "was not checked. run_recipe.py --dry-run checks it where the hub can be reached"
        for model in models.unknown(asked or ())
    ]
    return replace(options, warnings=(*options.warnings, *notes)), encoder_of(getattr(config, "model", None))


def resolved(config: Any, flags: Mapping[str, Any], words: Sequence[str], stands_in: bool) -> GraphOptions:
    """Return the graph options of a configuration, with flags and words applied to it.

    Args:
        config: A Bridge `ConfigContainer`.
        flags: Fields of the model and what was written.
        words: Hydra-style `section.name=value`.
        stands_in: Whether it was built from stand-ins, which Hydra cannot hold.

    Raises:
        OptionError: Training would refuse the result.
    """
    with redirect_stdout(io.StringIO()):  # training would print there what the answer has
        return resolve(config, flags, words, set_words if stands_in else None)


def _built(name: str, stands_in: bool) -> Any:
    try:
        return build_recipe(name)
    except OptionError as error:
        if not stands_in or error.__cause__ is None:
            raise
        advice = "run_recipe.py --dry-run imports Bridge and builds it as training does."
        raise OptionError.because("recipe", f"{error} It was read without Bridge's imports. {advice}") from error


def without_imports() -> list[str] | None:
    """Switch the plugin on, with stand-ins in the place of Bridge's imports.

    Returns:
        The models that recipes will take, by their names on the hub; None beside PyTorch, where all is as it is.
    """
    bridge_cg_plugin.activate()
    if "torch" in sys.modules and not hasattr(sys.modules["torch"], "__stand_in__"):
        return None
    logging.disable(logging.ERROR)
    standins.install()
    return models.replace_auto_bridge()


def _check_flag(name: str) -> None:
    """Refuse a flag that does not exist.

    Raises:
        OptionError: Names the nearest.
    """
    if name not in _FLAGS and not _means_something(name.removeprefix("--").replace("-", "_")):
        raise unknown_flag(name, _FLAGS)


def _check_name(word: str) -> None:
    """Refuse a word that sets nothing that a configuration has.

    Raises:
        OptionError: Names the nearest.
    """
    name, assigned, _ = word.lstrip("+-").partition("=")
    if not assigned or _means_something(name.replace("-", "_")):
        return
    section, dot, field = name.rpartition(".")
    known = sorted(SECTIONS) if dot and section not in SECTIONS else (*FIELDS, *SETTINGS)
    wrong = section if dot and section not in SECTIONS else field
    near = difflib.get_close_matches(wrong, known, n=1, cutoff=0.4)
    what = "section" if wrong == section else "option in docs/options.md"
    raise OptionError.unknown(name, what, near[0] if near else "")


def _means_something(name: str) -> bool:
    sections, field = split_name(name)
    known = field in (*FIELDS, *ATTRIBUTES, *SETTINGS, *OTHER_FIELDS) or bool(tuning_of(field))
    return known if not sections else sections[0] in SECTIONS
