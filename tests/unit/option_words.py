"""What users write, in short, and stand-ins of providers, for tests of options that go together or not."""

from dataclasses import field, make_dataclass
from types import SimpleNamespace

TE, FULL = (f"cuda_graph_impl={impl}" for impl in ("transformer_engine", "full_iteration"))
VISION = "vision_cuda_graph_impl=transformer_engine"
PACKED = "cuda_graph_max_packed_seqs=64"
FP8 = "fp8=hybrid fp8_recipe=tensorwise"
OFFLOAD = "fine_grained_activation_offloading=true offload_modules="


def told(facts):
    """Return in words what facts a configuration has; not in which words it was written."""
    kind = vars(type(facts)).items()
    derived = {name: getattr(facts, name) for name, held in kind if isinstance(held, property) and name[0] != "_"}
    return repr((derived, sorted(name for name, value in facts.settings.items() if value is True)))


def tower_of_hugging_face(name="Qwen25VLModelProvider", **fields):
    """Return the provider of a model whose vision tower is Hugging Face's, with vision graphs on."""
    kind = type(name, (SimpleNamespace,), {"__module__": "megatron.bridge.models.qwen_vl.qwen25_vl_provider"})
    return kind(**{"vision_cuda_graph_impl": "transformer_engine", "cuda_graph_impl": "none", **fields})


def gemma3(**fields):
    """Return the provider of a model whose layers take biases of attention."""
    declared = [("is_vision_language", bool, field(default=True, init=False)), ("freeze_vision_model", bool, False)]
    kind = make_dataclass("Gemma3VLModelProvider", [*declared, *((name, object) for name in fields)], kw_only=True)
    kind.__module__ = "megatron.bridge.models.gemma_vl.gemma3_vl_provider"
    return kind(**fields)


def nemotron(**fields):
    """Return the provider of a model whose encoder has the language model's settings, with vision graphs on."""
    module = "megatron.bridge.models.nemotron_omni.nemotron_omni_provider"
    base = type("NemotronVLModelProvider", (SimpleNamespace,), {"__module__": module})
    kind = type("NemotronOmniModelProvider", (base,), {"__module__": module})
    return kind(**{"vision_cuda_graph_impl": "transformer_engine", "cuda_graph_impl": "none", **fields})


def offloading(**fields):
    """Return the provider of a release before 0.6, with megatron-core's offloading on."""
    return SimpleNamespace(**{"cuda_graph_impl": "none", "fine_grained_activation_offloading": True, **fields})
