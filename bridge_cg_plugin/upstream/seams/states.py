"""What works: the state of every seam and feature, which of them a configuration asks for, and what was tested.

Patches say their state themselves; what is relied on is compared with upstream's sources.
"""

import functools
import json
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ...options import PACKED_FIELDS, PROVIDER_FIELDS, CudaGraphModule, Facts, GraphOptions
from ...options.combinations import padded_rows, whole_moe_layers
from ...options.language_model import IMPL, MODULES
from ...options.normalization import ALLREDUCE, splits_deepstack
from .activation import activate, is_on, loaded_patches
from .encoders import DECLARED, DECLARED_MODELS, QWEN3_VL, Declaration, other_providers
from .patches import Patch, State, bridge_release
from .registry import SEAMS, seam
from .registry.bridge import LANGUAGE_MODELS
from .seam import (
    BRIDGE,
    CONTAINERS,
    CORE,
    NEWEST,
    RELEASES,
    RUN_ONCE,
    TRANSFORMER_ENGINE,
    TRANSFORMERS,
    Feature,
    Seam,
    drift,
    minor,
)
from .source_reader import NoSourceError, SourceReader

CHUNKS = "virtual_pipeline_model_parallel_size"
VISION_IMPL, MAX_PACKED_SEQS = PROVIDER_FIELDS["impl"], PACKED_FIELDS["max_packed_seqs"]
HYBRIDS = tuple(provider for _, provider, _ in LANGUAGE_MODELS if provider != "GPTModelProvider")
KNOWN_MODELS = frozenset(model for seam in SEAMS for model in seam.models)


@dataclass(frozen=True, slots=True)
class Wish:
    """What a configuration asks for.

    Attributes:
        options: Its graph options.
        facts: What else decides what is needed, the model's provider among it.
    """

    options: GraphOptions
    facts: Facts

    @property
    def provider(self) -> str:
        """The class of model providers under which the registry has it; empty without one."""
        return next((base.__name__ for base in type(self.facts.model).__mro__ if base.__name__ in KNOWN_MODELS), "")

    @property
    def qwen3_vl_encoder(self) -> bool:
        """Whether the vision encoder is Qwen3-VL's, as that of any model is which is not known to have another."""
        others = {model.provider for model in DECLARED_MODELS} | {provider for _, provider in other_providers()}
        bases = {base.__name__ for base in type(self.facts.model).__mro__}
        return self.options.vision.enabled and others.isdisjoint(bases)

    @property
    def hybrid(self) -> bool:
        """Whether the decoder is a hybrid stack."""
        return bool(self.facts.mamba) or self.provider in HYBRIDS

    def asks(self, feature: str) -> bool:
        """Whether the configuration asks for a feature."""
        return feature in _ASKS and bool(_ASKS[feature].asked(self))


class _Ask(NamedTuple):
    """How a configuration asks for a feature.

    Attributes:
        asked: Whether one does.
        words: The field and value that do.
        remedy: What to set to ask no more.
    """

    asked: Callable[[Wish], Any]
    words: Callable[[Wish], str]
    remedy: str


def _field(name: str, off: str, value: Callable[[Wish], Any], asked: Callable[[Wish], Any]) -> _Ask:
    """Return how a field asks for a feature, with the value that does not."""
    return _Ask(asked, lambda wish: f"{name}={value(wish)}", f"{name}={off}")


def _vision(asked: Callable[[Wish], Any] = lambda wish: True) -> _Ask:
    own = VISION_IMPL, "none", lambda wish: wish.options.vision.impl
    return _field(*own, lambda wish: wish.options.vision.enabled and asked(wish))


def _encoder(encoder: Declaration) -> _Ask:
    return _vision(lambda wish: wish.provider == encoder.model.provider)


def _language_model(asked: Callable[[Wish], Any]) -> _Ask:
    return _field(IMPL, "none", lambda wish: wish.options.language_model.impl, asked)


def _packed(asked: Callable[[Wish], Any] = lambda wish: True) -> _Ask:
    own = MAX_PACKED_SEQS, "null", lambda wish: wish.options.packed.max_packed_seqs
    return _field(*own, lambda wish: wish.options.packed.enabled and asked(wish))


def _rotates_in_graphs(wish: Wish) -> bool:
    captured = wish.options.language_model.captures(CudaGraphModule.attn) and not wish.options.packed.enabled
    return captured and getattr(wish.facts.model, "position_embedding_type", None) == "mrope"


def _model_chunks(wish: Wish) -> int:
    return getattr(wish.facts.model, CHUNKS, None) or 1


# Features that are not here are asked for by no configuration: a run goes on without them.
_ASKS: dict[str, _Ask] = {
    Feature.OPTIONS: _Ask(
        lambda wish: wish.options.vision.enabled or wish.options.packed.enabled,
        lambda wish: f"{wish.provider} with graph options",
        "the graph options to their defaults",
    ),
    Feature.VISION: _vision(),
    Feature.VISION_QWEN3_VL: _vision(lambda wish: wish.qwen3_vl_encoder),
    **{encoder.feature: _encoder(encoder) for encoder in DECLARED},
    Feature.DEEPSTACK_GRADIENTS: _Ask(
        lambda wish: wish.options.vision.deepstack_gradient_allreduce and splits_deepstack(wish.facts),
        lambda wish: f"{ALLREDUCE}=true",
        f"{ALLREDUCE}=false, which trains with upstream's gradients",
    ),
    Feature.OFFLOAD_IN_GRAPHS: _Ask(
        lambda wish: any(
            part.enabled and part.moves_activations for part in (wish.options.vision, wish.options.packed)
        ),
        lambda wish: "offloading or recompute in graphs",
        "offload, recompute and offload_above_gb of vision and packed graphs to null",
    ),
    Feature.LANGUAGE_MODEL: _language_model(
        lambda wish: wish.options.language_model.impl == "transformer_engine" and not wish.options.packed.enabled
    ),
    Feature.MULTIMODAL_ROTARY: _language_model(_rotates_in_graphs),
    Feature.FULL_ITERATION: _language_model(lambda wish: padded_rows(wish.options, wish.facts)),
    Feature.PACKED: _packed(),
    Feature.PACKED_ATTENTION: _packed(lambda wish: wish.provider not in QWEN3_VL and not wish.hybrid),
    Feature.PACKED_QWEN3_VL: _packed(lambda wish: wish.provider in QWEN3_VL),
    Feature.PACKED_HYBRIDS: _packed(lambda wish: wish.hybrid),
    Feature.PACKED_EXPERTS: _language_model(
        lambda wish: wish.facts.moe and (wish.options.packed.enabled or padded_rows(wish.options, wish.facts))
    ),
    Feature.EXPERTS_INSIDE: _Ask(
        lambda wish: bool(whole_moe_layers(wish.options, wish.facts)),
        lambda wish: "experts in graphs of all layers",
        f"{MODULES}=attn,moe_router with packs, where experts stay eager",
    ),
    Feature.PACKED_FP8: _packed(lambda wish: wish.facts["fp8"] or wish.facts["fp4"]),
    Feature.PIPELINES: _field(CHUNKS, "null", _model_chunks, lambda wish: _model_chunks(wish) > 1),
}


def needs(wish: Wish, seam: Seam) -> str | None:
    """Return the feature for which a configuration needs a seam; None where it does not."""
    if seam.instead or (seam.models and wish.provider not in seam.models):
        return None
    return next((feature for feature in seam.features if wish.asks(feature)), None)


def refusal(wish: Wish, broken: Mapping[str, str], release: str, table: Iterable[str]) -> str:
    """Return why a configuration cannot run with these seams broken; empty where it can.

    Args:
        wish: What the configuration asks for.
        broken: Seam -> what was found in its place.
        release: The installed release of megatron-bridge.
        table: Releases that were checked.
    """
    needed: dict[str, list[str]] = {}
    for name, why in broken.items():
        feature = needs(wish, seam(name))
        if feature is not None:
            needed.setdefault(feature, []).append(f"{name}: {why}")
    return " ".join(
        f"{_ASKS[feature].words(wish)} needs {feature}, a feature that does not fit megatron-bridge {release} "
        f"({'; '.join(found)}). Set {_ASKS[feature].remedy}, or use a release of the version table "
        f"({', '.join(table)})."
        for feature, found in needed.items()
    )


# Every feature.
FEATURES: tuple[str, ...] = (*Feature, *(encoder.feature for encoder in DECLARED))
# Features of those models alone that their seams name.
_OF_NAMED_MODELS = (Feature.OPTIONS, Feature.PIPELINES)


@dataclass(frozen=True, slots=True)
class FeatureState:
    """Whether a feature works.

    Attributes:
        state: "ready", "partly" (not for `models`), "not available", or "off" as the plugin is.
        seams: The broken seams that it needs.
        models: Classes of model providers for which it does not work; all where empty.
    """

    state: Literal["ready", "partly", "not available", "off"]
    seams: tuple[str, ...] = ()
    models: tuple[str, ...] = ()


def feature_states(broken: Collection[str], on: bool = True) -> dict[str, FeatureState]:
    """Return the state of every feature.

    Args:
        broken: Names of the seams that are broken.
        on: Whether the plugin is on.
    """
    return {feature: _feature_state(feature, broken, on) for feature in FEATURES}


def _feature_state(feature: str, broken: Collection[str], on: bool) -> FeatureState:
    seams = [seam for seam in SEAMS if feature in seam.features]
    lost = [seam for seam in seams if seam.name in broken and not seam.instead]
    if not lost:
        return FeatureState("ready" if on else "off")
    names = tuple(seam.name for seam in lost)
    models = tuple(dict.fromkeys(model for seam in lost for model in seam.models))
    served = {model for seam in seams for model in seam.models} if feature in _OF_NAMED_MODELS else set()
    if not all(seam.models for seam in lost) or served == set(models):
        return FeatureState("not available", names)
    return FeatureState("partly", names, models)


def lost_with(seam: Seam) -> str:
    """Return what is lost where a seam does not fit, for messages: features, and for which models, or a swap."""
    if seam.instead:
        return f"a swap: {seam.instead} in its place"
    models = f" (for {', '.join(seam.models)})" if seam.models else ""
    return f"{', '.join(seam.features)}{models}"


class SeamState(NamedTuple):
    """How a seam stands in this process.

    Attributes:
        seam: The seam.
        state: "active" (replaced by the plugin), "native" (upstream's own, as expected), "broken" (not as expected),
            "waiting" (replaced when upstream's module is imported) or "off".
        reason: Why, where that is not obvious.
    """

    seam: Seam
    state: State
    reason: str


def seam_states() -> dict[str, SeamState]:
    """Return the state of every seam by name. Imports nothing of upstream: its sources are read."""
    known, on = {patch.name: patch for patch in loaded_patches()}, is_on()
    release = bridge_release()
    return {s.name: SeamState(s, *_state(s, known.get(s.name), on, *installed_state(s.name, release))) for s in SEAMS}


def fits(*names: str) -> bool:
    """Whether seams are as expected in the sources that this process uses; swaps that are not are left out."""
    release = bridge_release()
    return all(installed_state(name, release)[0] != "broken" for name in names)


def broken_seams() -> dict[str, str]:
    """Return the seams that do not fit, with what was found.

    First it patches functions again that somebody replaced after the plugin did, like any function of upstream.
    """
    if is_on():
        activate()
    return {name: found.reason for name, found in seam_states().items() if found.state == "broken"}


@functools.cache
def installed_state(name: str, release: str) -> tuple[State, str]:
    """Compare a seam with the sources that this process uses; they do not change while it runs."""
    return compare(seam(name), _installed_sources(), release)


@functools.cache
def _installed_sources() -> SourceReader:
    return SourceReader()


def _state(seam: Seam, patch: Patch | None, on: bool, state: State, reason: str) -> tuple[State, str]:
    if seam.touch != "patched":
        return state, reason
    if not on:
        return "off", patch.reason if patch is not None else ""
    if seam.module not in sys.modules:
        waits = (state, reason) == ("native", "")
        return ("waiting", f"until {seam.module} is imported") if waits else (state, reason)
    if patch is None or patch.state == "off":
        return "broken", f"the plugin failed to replace {seam.place}; the log says why"
    patch.look()
    if patch.state == "active" and state == "broken":  # behind what was patched, upstream's own is not as expected
        return state, reason
    return patch.state, patch.reason


def compare(seam: Seam, reader: SourceReader, release: str) -> tuple[State, str]:
    """Compare a seam with a release's sources; returns "native", "off" (no source to compare) or "broken", and why."""
    if not seam.packaged:
        return "off", "not in upstream's wheels"
    if not seam.expected_in(release):
        return "native", f"came with megatron-bridge {seam.since}"
    package = seam.module.split(".")
    if not any(reader.has_module(".".join(package[:depth])) for depth in range(2, len(package) + 1)):
        return "off", f"no sources of {'.'.join(package[:2])} here"
    try:
        differences = drift(seam, reader.find(seam))
    except NoSourceError as error:
        return "off", str(error)
    return ("broken", "; ".join(differences)) if differences else ("native", "")


class CombinationStatus(NamedTuple):
    """What a combination of releases was checked with.

    Attributes:
        state: "run" (the plugin's tests ran with it), "audited" (every seam was compared with its sources) or
            "unknown".
        reason: What was run, what the audit found, or which release was not audited.
    """

    state: Literal["run", "audited", "unknown"]
    reason: str


@functools.cache
def audit_record() -> dict[str, Any]:
    """Return what `scripts/audit_releases.py` wrote.

    "audits" has an entry for each pair of Bridge and megatron-core, and for each release of the other packages: its
    "releases" (package -> version), the number of seams "compared", and the "drift" (seam -> what differs).
    """
    record: dict[str, Any] = json.loads(Path(__file__).with_name("audited.json").read_text())
    return record


def combination_status(versions: Mapping[str, str | None]) -> CombinationStatus:
    """Return what a combination of releases was checked with.

    A build with a local version, as "2.20.2+abc", is at most "audited": its sources may differ from the release's.

    Args:
        versions: Package -> version of "megatron-bridge", "megatron-core", "transformer-engine" and, where it counts,
            "transformers"; None where a package is not installed. Other packages are ignored.
    """
    required = (BRIDGE, CORE, TRANSFORMER_ENGINE)
    absent = [name for name in required if not versions.get(name)]
    if absent:
        return CombinationStatus("unknown", f"not installed: {', '.join(absent)}")
    found = {name: version for name in (*required, TRANSFORMERS) if (version := versions.get(name))}
    for release in (*RELEASES, *RUN_ONCE):
        if found.items() <= release.packages.items():
            return CombinationStatus("run", release.tests)
    return _audited({name: version.partition("+")[0] for name, version in found.items()})


def nearest_set(versions: Mapping[str, str | None]) -> str:
    """Return the set of releases that is nearest to a combination, how it differs, and what was run with it."""
    sets = {**CONTAINERS, **{release.bridge: release for release in RELEASES[1:]}, "newest": NEWEST}

    def same(name: str) -> tuple[bool, int]:
        known = [minor(version) == minor(versions.get(name) or "") for name, version in sets[name].packages.items()]
        return known[0], sum(known)

    nearest = max(reversed(sets), key=same)
    others = {name: v for name, v in sets[nearest].packages.items() if v and versions.get(name) != v}
    differs = ", ".join(f"{name} {version}" for name, version in others.items())
    return f"{nearest}{f' (which has {differs})' if differs else ''}. Run with it: {sets[nearest].tests}"


def lost_features(drift: Collection[str]) -> tuple[str, ...]:
    """Return the features that do not work, or not for every model, where these seams drifted."""
    return tuple(str(name) for name, feature in feature_states(drift).items() if feature.state != "ready")


def _audited(found: Mapping[str, str]) -> CombinationStatus:
    entries = []
    for names in ((BRIDGE, CORE), (TRANSFORMER_ENGINE,), (TRANSFORMERS,)):
        wanted = {name: found[name] for name in names if name in found}
        entry = next((e for e in audit_record()["audits"] if e["releases"] == wanted), None)
        if wanted and entry is None:
            words = " with ".join(f"{name} {version}" for name, version in wanted.items())
            return CombinationStatus("unknown", f"{words} was not audited")
        entries += [entry] if entry else []
    drift = {name for entry in entries for name in entry["drift"]}
    compared, features = sum(entry["compared"] for entry in entries), lost_features(drift)
    reason = f"{compared - len(drift)} of {compared} seams fit the releases' sources"
    lost = f". Lost: {', '.join(features)}" if features else ""
    return CombinationStatus("audited", reason + lost)
