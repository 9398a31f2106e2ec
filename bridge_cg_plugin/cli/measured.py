"""What the project measured: ratios of graphs over eager, and where a configuration differs from what they are of.

`measured.json` has them, by microbatch and by whole step. A test holds every figure to docs/benchmarks.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from pathlib import Path
from typing import Any

from bridge_cg_plugin.attention_bounds import deterministic
from bridge_cg_plugin.options import GraphOptions
from bridge_cg_plugin.options.graph_options import SETTING
from bridge_cg_plugin.options.language_model import IMPL, MODULES
from bridge_cg_plugin.options.packed import PACKED_FIELDS
from bridge_cg_plugin.options.vision import PROVIDER_FIELDS

from .explain.models import encoder_of

FILE = Path(__file__).with_name("measured.json")
# The encoder of measured steps that name no other.
TOWER = "Qwen3-VL encoder of 27 layers of 1152"
# GB of memory that a GPU has.
CARDS = {"h100": 80, "h200": 141, "b200": 180}
GIB, GB = 2**30, 10**9
# Fields of the layout -> their values on one GPU.
ALONE = {
    "tensor_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "sequence_parallel": False,
    "cp_comm_type": "p2p",
}
# Fields of a model, of its precision and of options -> the values that records are of.
_TRAINED = {"freeze_vision_model": (False,), "freeze_language_model": (False,), "recompute_granularity": ()}
_BF16 = dict.fromkeys(("fp32", "fp16", "fp8", "fp4"), (False, ""))
_KEPT: Mapping[str, Sequence[Any]] = {"offload": (), "recompute": (), "offload_above_gb": ()}
DELTA_NET, PREDICTION = "gated-delta-net", "multi-token-prediction"


class NotMeasured(ValueError):
    """No record supports a figure; names what was not measured."""


@cache
def records() -> dict[str, list[dict[str, Any]]]:
    """Return all measured whole steps, and microbatches of packs: rows of case, mode, tokens, and time over eager's."""
    found: dict[str, list[dict[str, Any]]] = json.loads(FILE.read_text())
    return found


def of_language_model(model: Any, modules: Iterable[str]) -> dict[str, Any]:
    """Return the packs nearest to a language model's: of its kind, its modules, ranks and width in turn.

    Args:
        model: A Bridge provider.
        modules: Parts of layers on graphs; none are all.
    """
    wanted, ranks = sorted(modules), ranks_of(model)
    found = [each for each in records()["packs"] if each["kind"] == kind_of(model)]
    found = [each for each in found if each["modules"] == wanted] or [each for each in found if not each["modules"]]
    return min(found, key=lambda each: (each["ranks"] != ranks, bool(each["ranks"]), _distance(each["of"], model)))


def kind_of(model: Any) -> str:
    """Return which of the measured kinds the language model of a Bridge provider is, as far as its fields tell."""
    if "M" in _pattern(model):
        return "hybrid"
    return "experts" if max(_size(model, name) or 0 for name in _EXPERTS) > 1 else "dense"


_EXPERTS = ("num_moe_experts", "expert_model_parallel_size")


def _distance(layers: str, model: Any) -> float:
    """Return how far the width of measured layers is from a model's; 0 where that is not known."""
    width = int(layers.rpartition(" of ")[2])
    return abs(math.log((_size(model, "hidden_size") or width) / width))


def _pattern(model: Any) -> str:
    patterns = (getattr(model, name, None) for name in ("hybrid_layer_pattern", "hybrid_override_pattern"))
    return next((text for text in patterns if isinstance(text, str) and text), "").partition("/")[0]


def ranks_of(model: Any) -> dict[str, Any]:
    """Return the fields of a Bridge provider's layout that are not as on one GPU."""
    found = {name: getattr(model, name, None) for name in ALONE}
    exchange = ((found["context_parallel_size"] or 1) > 1 and found["cp_comm_type"]) or "p2p"
    found["cp_comm_type"] = exchange if isinstance(exchange, str) else "+".join(dict.fromkeys(exchange))
    kept = {name: value for name, value in found.items() if isinstance(value, type(ALONE[name]))}
    return {name: value for name, value in kept.items() if value != ALONE[name]}


def layers_of(model: Any) -> str:
    """Return the layers of a Bridge provider's language model in words.

    Raises:
        NotMeasured: They are not known, or of a kind that no record is of.
    """
    if getattr(model, "multi_latent_attention", None) is True:
        raise NotMeasured("multi-latent attention")
    pattern, experts = _pattern(model), _size(model, "num_moe_experts") or 0
    frequency = getattr(model, "moe_layer_freq", 1)
    every = frequency == 1 or (isinstance(frequency, Sequence) and {*frequency} == {1})
    if not pattern and experts > 1 and not every:
        raise NotMeasured("layers with and without experts")
    if unknown := set(pattern) - set("M*-E|"):
        raise NotMeasured(f"layers {', '.join(sorted(unknown))} of hybrid_layer_pattern")
    if not pattern:
        ends = "E" if experts > 1 else "-"
        pattern = "".join(f"{'G' if linear else '*'}{ends}" for linear in _linear(model))
    pattern += "T" * (_size(model, "mtp_num_layers") or 0)
    names = {"*": "attention", "G": DELTA_NET, "-": "MLP", "E": f"{experts}-expert", "M": "Mamba", "T": PREDICTION}
    counts = ", ".join(f"{pattern.count(letter)} {name}" for letter, name in names.items() if letter in pattern)
    return f"{counts} layers of {_known(model, 'hidden_size')}"


def _linear(model: Any) -> Sequence[bool]:
    """Return for each layer whether it attends linearly."""
    variant, every = getattr(model, "experimental_attention_variant", None), getattr(model, "linear_attention_freq", 1)
    layers = _known(model, "num_layers")
    if not isinstance(variant, str):
        return [False] * layers
    if variant != "gated_delta_net" or not isinstance(every, int | list) or not every:
        raise NotMeasured("linear attention")
    return every if isinstance(every, list) else [i % every > 0 for i in range(1, layers + 1)]


def _size(model: Any, name: str) -> int | None:
    value = getattr(model, name, None)
    return value if isinstance(value, int) and value > 0 else None


def _known(model: Any, name: str) -> int:
    if not (value := _size(model, name)):
        raise NotMeasured(f"unknown model.{name}")
    return value


def differences(config: Any, ranks: Mapping[str, Any], adapter: str | None = None) -> list[str]:
    """Return what of a configuration's training was not measured, each as it is written.

    Args:
        config: A Bridge `ConfigContainer`.
        ranks: Fields of the layout that were measured and are not as on one GPU.
        adapter: The kind of adapters that was measured.
    """
    held, measured = {**ALONE, **ranks_of(config.model)}, {**ALONE, **ranks}
    found = [f"model.{name}={held[name]}" for name in ALONE if held[name] != measured[name]]
    found += _others(config.model, _TRAINED, "model.{}".format)
    peft, precision = getattr(config, "peft", None), getattr(config, "mixed_precision", None)
    own = None if peft is None else type(peft).__name__
    found += [] if own == adapter else [f"peft={own}"]
    if isinstance(precision, str):
        found += [] if precision == "bf16_mixed" else [f"mixed_precision={precision}"]
    else:
        found += _others(precision, _BF16, "mixed_precision.{}".format)
    return [*found, *(["deterministic algorithms"] if deterministic() else [])]


def _others(owner: Any, measured: Mapping[str, Sequence[Any]], written: Callable[[str], str]) -> list[str]:
    """Return values that no record is of, spelled by `written`; None in `measured` is a value that no record tells."""
    known = [name for name, values in measured.items() if None not in values]
    own = {name: reduce(lambda found, part: getattr(found, part, None), name.split("."), owner) for name in known}
    return [f"{written(name)}={value}" for name, value in own.items() if value not in (None, (), *measured[name])]


def _other_packs(options: GraphOptions, modules: Sequence[str] = ()) -> list[str]:
    named = sorted(module.name for module in options.language_model.modules)
    others = [f"{MODULES}={named}"] if named and named != list(modules) else []
    return [*_others(options.packed, _KEPT, PACKED_FIELDS.__getitem__), *others]


@dataclass(frozen=True, slots=True)
class Nearest:
    """The measured step, or the microbatches, that are nearest to a configuration.

    Attributes:
        found: A step as `measured.json` has it, or microbatches of a part; these without their rows where they are of
            other data or layers. Empty for a model that has no language model.
        differs: What of the configuration was not measured, each as it is written.
        same_layers: Whether a step is of the configuration's language model; others' memory says nothing of its own.
    """

    found: Mapping[str, Any]
    differs: tuple[str, ...] = ()
    same_layers: bool = True

    @property
    def whole(self) -> bool:
        """Whether it is a whole step."""
        return "graphs_ms" in self.found

    @property
    def alike(self) -> bool:
        """Whether its figures are of such data and layers."""
        return self.whole or "rows" in self.found

    def time(self) -> str:
        """Return the time of a step in words."""
        others = f" and {len(self.differs) - 3} more" if len(self.differs) > 3 else ""
        missing = f" with {', '.join(self.differs[:3])}{others}" if self.differs else ""
        if not self.found:
            return f"not measured{missing}. bridge-cg compare measures it"
        one = self.found
        if not self.alike:
            text = f"packs of {one['of']}, not this model"
        elif self.whole:
            eager = one["eager_ms"]
            text = f"{one['graphs_ms']:.0f} ms on graphs, {_range(eager)} ms eager, "
            text += _faster([one["graphs_ms"] / ms for ms in eager])
        else:
            tokens, ratios = zip(*(row[2:] for row in one["rows"]), strict=True)
            text = f"{one['of']}, forward and backward of packs of {_range(tokens)} tokens, {_faster(ratios)}"
        text += f" ({_where(one)})"
        return text if self.whole and not missing else f"not measured{missing}. Nearest: {text}"

    def memory(self) -> str:
        """Return the peak memory of a rank in words."""
        if not (self.whole and self.same_layers):
            peaks = [step["peak_gb"] / step["eager_peak_gb"] for step in records()["steps"]]
            steps = f". Steps that were measured took {_range(peaks, '.2f')} of eager's" if self.alike else ""
            return f"not measured{steps}"
        graphs, eager = self.found["peak_gb"], self.found["eager_peak_gb"]
        return self._nearest(f"{graphs:.1f} GiB on graphs, {eager:.1f} GiB eager, on {_gpus(self.found)}")

    def fits(self, gpu: str | None) -> str:
        """Return in words whether the peak memory fits a GPU, or which.

        Args:
            gpu: A key of `CARDS`; None are all.
        """
        if not (self.whole and self.same_layers):
            return "not measured: no step of such a model was. bridge-cg compare measures it"
        peak = self.found["peak_gb"] * GIB / GB
        cards = CARDS if gpu is None else {gpu: CARDS[gpu]}
        no = f"no without {saves}" if (saves := self._saves()) else "no"
        fit = [f"{card} ({size} GB) {'yes' if peak <= size else no}" for card, size in cards.items()]
        return self._nearest(f"{', '.join(fit)}, by a peak of {peak:.1f} GB on {_gpus(self.found)}")

    def exceeds(self, gpu: str | None) -> bool:
        """Return whether the peak is above a GPU's memory, a key of `CARDS`, and nothing was asked that saves some."""
        known = self.whole and self.same_layers and not self._saves()
        return known and self.found["peak_gb"] * GIB / GB > CARDS.get(gpu or "", math.inf)

    def faster(self) -> str:
        """Return what made this step faster still in words; empty where nothing was measured."""
        if not self.whole or self.found["setting"] != "exact":
            return ""
        wanted = self.found["case"], "fastest"
        ms = [step["graphs_ms"] for step in records()["steps"] if (step["case"], step["setting"]) == wanted]
        texts = [f"{SETTING}=fastest: {one:.0f} ms in the place of {self.found['graphs_ms']:.0f}" for one in ms]
        return self._nearest(texts[0]) if texts else ""

    def _saves(self) -> str:
        return next((field for field in self.differs if "offload" in field or "recompute" in field), "")

    def _nearest(self, text: str) -> str:
        return f"not measured. Nearest, {self.found['case']}: {text}" if self.differs else text

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values: ms, GiB, ratios."""
        return {**self.found, "not_measured": list(self.differs)}


def _faster(ratios: Sequence[float]) -> str:
    return f"{_range([1 / ratio for ratio in ratios], '.1f')} times as fast"


def _range(values: Sequence[float], form: str = ".0f") -> str:
    return " to ".join(dict.fromkeys(f"{value:{form}}" for value in (min(values), max(values))))


def _layout(ranks: Mapping[str, Any]) -> str:
    sizes = [f"{of}{ranks[name]}" for of, name in zip(("TP", "CP", "EP", "PP"), ALONE, strict=False) if name in ranks]
    others = ["sequence parallel"] if ranks.get("sequence_parallel") else []
    return ", ".join([*sizes, *others, *([ranks["cp_comm_type"]] if "cp_comm_type" in ranks else [])])


def _gpus(one: Mapping[str, Any]) -> str:
    count = one.get("gpus") or math.prod(value for value in one["ranks"].values() if isinstance(value, int))
    return f"{count} {one['gpu']}" if count > 1 else str(one["gpu"])


def _where(one: Mapping[str, Any]) -> str:
    batch = f"{one['samples']} samples of {one['tokens']} tokens" if one.get("samples") else ""
    source, host = one.get("case") or one["file"], one.get("host", "host not recorded")
    return ", ".join(filter(None, (source, _gpus(one), _layout(one["ranks"]), batch, one["date"], host)))


def nearest(config: Any, options: GraphOptions, gpu: str | None, gpus: int | None) -> Nearest | None:
    """Return what was measured that is nearest to a configuration; None where none of it runs on graphs.

    Args:
        config: A Bridge `ConfigContainer`, with everything applied.
        options: Its graph options.
        gpu: A key of `CARDS`; None is not known.
        gpus: How many there are; None is not known.
    """
    try:
        layers = layers_of(config.model)
        unlike = [layers] if DELTA_NET in layers or PREDICTION in layers else []  # no packs are of such
    except NotMeasured as why:
        layers, unlike = "", [str(why)]
    if options.vision.enabled:
        found = [_step(step, config, options, layers, (gpu, gpus)) for step in records()["steps"]]
        return min(found, key=lambda pair: pair[0])[1]
    if options.language_model.impl == "none":
        return None
    unlike += [] if options.packed.enabled else ["unpacked sequences"]
    if unlike and hasattr(config.model, "_stands_in"):  # of diffusion
        return Nearest({}, tuple(unlike))
    near = of_language_model(config.model, [module.name for module in options.language_model.modules])
    if unlike:
        return Nearest({name: value for name, value in near.items() if name != "rows"}, tuple(unlike))
    differs = [*([] if layers == near["of"] else [layers]), *_other_packs(options, near["modules"])]
    differs += [*differences(config, near["ranks"]), *_other_gpu(near["gpu"], gpu)]
    return Nearest(near, tuple(differs))


def _step(
    step: Mapping[str, Any], config: Any, options: GraphOptions, layers: str, place: tuple[str | None, int | None]
) -> tuple[tuple[Any, ...], Nearest]:
    """Return a step with what it differs in, and how much that is."""
    encoder, model = encoder_of(config.model), []
    model += [] if encoder == step.get("encoder", TOWER) else [str(encoder)]
    model += [] if step["layers"] == layers else [layers or "its language model's layers"]
    model += [] if step["impl"] == options.language_model.impl else [f"{IMPL}={options.language_model.impl}"]
    model += differences(config, step["ranks"], step["adapter"])
    model += _other_packs(options)
    setting = options.choice.setting
    model += [] if step["setting"] in (None, setting) else [f"{SETTING}={setting}"]
    vision = {
        **_KEPT,
        "kernels": ("exact",) if step["setting"] == "exact" else ("auto", "fast"),
        "attention": ("auto", "cudnn"),
    }
    model += _others(options.vision, vision, PROVIDER_FIELDS.__getitem__)
    held = {
        "model.seq_length": (step["tokens"],),
        "train.micro_batch_size": (step["micro"],),
        "optimizer.optimizer": ("adam",),
        "ddp.use_distributed_optimizer": (True,),
    }
    model += _others(config, held, str)
    own = _others(config, {"train.global_batch_size": (step["samples"],)}, str)
    own += [*([] if place[1] in (None, step["gpus"]) else [f"{place[1]} GPUs"]), *_other_gpu(step["gpu"], place[0])]
    apart = abs(math.log((place[1] or step["gpus"]) / step["gpus"]))  # GPUs divide the optimizer's memory
    kinds = step["kind"] != kind_of(config.model), any(field.startswith("peft=") for field in model)
    alike = (*kinds, _distance(step["layers"], config.model), len(model), apart, len(own))
    return alike, Nearest(step, (*model, *own), step["layers"] == layers)


def _other_gpu(measured: str, gpu: str | None) -> list[str]:
    return [] if gpu is None or gpu in measured.lower() else [f"--gpu {gpu}"]
