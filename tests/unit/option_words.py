"""What users write, in short, and stand-ins of providers, for tests of options that go together or not."""

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


def tower_of_hugging_face(**fields):
    """Return the provider of a model whose vision tower is Hugging Face's, with vision graphs on."""
    module = "megatron.bridge.models.qwen_vl.qwen25_vl_provider"
    kind = type("Qwen25VLModelProvider", (SimpleNamespace,), {"__module__": module})
    return kind(**{"vision_cuda_graph_impl": "transformer_engine", "cuda_graph_impl": "none", **fields})


def nemotron(**fields):
    """Return the provider of a model whose encoder has the language model's settings, with vision graphs on."""
    module = "megatron.bridge.models.nemotron_omni.nemotron_omni_provider"
    base = type("NemotronVLModelProvider", (SimpleNamespace,), {"__module__": module})
    kind = type("NemotronOmniModelProvider", (base,), {"__module__": module})
    return kind(**{"vision_cuda_graph_impl": "transformer_engine", "cuda_graph_impl": "none", **fields})


def offloading(**fields):
    """Return the provider of a release before 0.6, with megatron-core's offloading on."""
    return SimpleNamespace(**{"cuda_graph_impl": "none", "fine_grained_activation_offloading": True, **fields})
