"""Kernels compiled ahead: for which sizes, in which thread, and what happens where that fails."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
import torch

from bridge_cg_plugin.graphs.recordings.compiling import BEGIN_WITH, TURNS, KernelCompiler
from bridge_cg_plugin.upstream.kernels import precompile

from .towers import forward, graphs_on, new_tower, tower

KERNELS = ["_add_partials", "_bias_gelu", "_bias_gelu_backward", "_clear_padding", "_rotate_qkv", "_rotate_qkv"]


WAIT_S = 30


@dataclass(frozen=True)
class Kernel:
    """One of a size's kernels."""

    tokens: int
    number: int
    kernels: "Kernels" = field(compare=False)

    def __call__(self):
        self.kernels.compile_one(self.tokens, self.number)


class Kernels:
    """Compiles two kernels for each size, the second one when `hold` lets it."""

    def __init__(self):
        self.begun, self.done, self.threads = [], [], set()
        self.hold = threading.Event()
        self.hold.set()

    def compilations(self, tokens):
        return (Kernel(tokens, number, self) for number in range(2))

    def compile_one(self, tokens, number):
        self.begun.append((tokens, number))
        assert number == 0 or self.hold.wait(WAIT_S)
        self.done.append((tokens, number))
        self.threads.add(threading.get_ident())


def wait_for(condition):
    ends = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.001)


@pytest.fixture
def kernels():
    return Kernels()


def test_sizes_of_a_magnitude_are_compiled_once_and_beside_the_training(kernels, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    compiler = KernelCompiler(kernels.compilations)
    compiler.begin(torch.device("cuda", 0))
    for tokens in (784, 800, 700, 3000):
        compiler.saw(tokens)
    sizes = [BEGIN_WITH, 784, 1568, 392, 3136, 196, 6272, 3000, 6000, 1500, 12000, 750, 24000]
    wait_for(lambda: len(kernels.done) == 2 * len(sizes))
    assert sorted(kernels.done) == sorted((tokens, kernel) for tokens in sizes for kernel in range(2))
    assert threading.get_ident() not in kernels.threads and len(kernels.threads) == 1


def test_a_recording_waits_for_one_kernel_and_the_next_ones_for_it(kernels):
    kernels.hold.clear()
    KernelCompiler(kernels.compilations).saw(784)
    wait_for(lambda: len(kernels.begun) == 2)
    threading.Timer(0.05, kernels.hold.set).start()
    with TURNS.recording():
        assert len(kernels.done) == 2, "a recording began beside a kernel that was being compiled"
        with TURNS.recording():  # of a part, inside
            time.sleep(0.05)
        time.sleep(0.05)
        assert len(kernels.begun) == 2
    wait_for(lambda: len(kernels.done) == 12)


def test_an_interrupt_while_a_recording_waits_lets_others_go_on(kernels, monkeypatch):
    kernels.hold.clear()
    KernelCompiler(kernels.compilations).saw(784)
    wait_for(lambda: len(kernels.begun) == 2)
    with monkeypatch.context() as interrupted:
        interrupted.setattr(TURNS._changed, "wait_for", interrupt)
        with pytest.raises(KeyboardInterrupt), TURNS.recording():
            pass
    kernels.hold.set()
    wait_for(lambda: len(kernels.done) == 12)


def interrupt(condition):
    raise KeyboardInterrupt


def test_deleted_graphs_let_the_model_go_while_others_compile():
    """What waits for its turn holds the model: all of its memory, for as long as compilers of other models take."""
    with TURNS.recording():  # nothing else is compiled
        model = new_tower()
        with graphs_on(model, capture=False):
            forward(model, [(1, 4, 4)])
        held = weakref.ref(model)
        del model
        gc.collect()
        assert held() is None


@pytest.mark.parametrize("around", [torch.no_grad, torch.autograd.graph.save_on_cpu])
def test_a_recording_compiles_what_is_missing_all_at_once_whatever_its_thread_is_in(kernels, around):
    """Each kernel waits for the others, so one after the other would never end; a backward finds what they are."""
    together = threading.Barrier(2, timeout=WAIT_S)
    kernels.compile_one = lambda tokens, number: (together.wait(), kernels.done.append((tokens, number)))

    def compilations(tokens):
        leaf = torch.ones(2, requires_grad=True)
        torch.autograd.grad((leaf * leaf).sum(), leaf)
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        return kernels.compilations(tokens)

    compiler = KernelCompiler(compilations)
    with TURNS.recording(), around():
        compiler.finish(784)
        assert sorted(kernels.done) == [(784, 0), (784, 1)]
        compiler.finish(784)
        assert len(kernels.done) == 2, "compiled twice"


@pytest.mark.parametrize("when", ["while it is found", "while it is compiled"])
def test_an_error_is_left_to_the_recording(when):
    tried = []

    def compile_one():
        raise RuntimeError("no compiler")

    def compilations(tokens):
        tried.append(tokens)
        if when == "while it is found":
            raise RuntimeError("no such width")
        yield compile_one

    compiler = KernelCompiler(compilations)
    compiler.saw(4)
    compiler.saw(100)
    wait_for(lambda: 100 in tried)
    with TURNS.recording():
        compiler.finish(1000)
    assert 1000 in tried


def test_a_process_that_ends_waits_for_no_more_than_a_kernel():
    script = """
import time
from functools import partial
from bridge_cg_plugin.graphs.recordings.compiling import KernelCompiler

def compilations(tokens):
    while True:
        yield partial(time.sleep, 0.01)

KernelCompiler(compilations).saw(4)
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=120, capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


@pytest.fixture
def compiled(monkeypatch):
    """What kernels would be compiled for, as on a machine with a GPU."""
    pytest.importorskip("triton")
    from bridge_cg_plugin.vision.kernels import bias, head_norms, norms, padding, reduction, rotary

    found = []

    def note(kernel, grid, *arguments, **settings):
        tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
        assert all(each.is_meta for each in tensors)
        found.append((kernel.__name__, [tuple(each.shape) for each in tensors], settings))

    for module in (bias, norms, padding, reduction, rotary, head_norms):
        monkeypatch.setattr(module, "launch", note)
    monkeypatch.setattr(precompile, "kernels_available", lambda: True)
    return found


def test_a_towers_kernels_of_its_widths(compiled):
    list(precompile.compilations((tower(),), 48))
    assert sorted(name for name, *_ in compiled) == KERNELS, "layers that are alike are compiled for once"
    (settings,) = [s for name, _, s in compiled if name == "_rotate_qkv" and s["SIGN"] == -1.0]
    assert settings["COPY_V"] is False, "gradients come as cuDNN's attention leaves them"


@pytest.mark.parametrize("in_fp32", [False, True])
def test_rotations_of_a_language_model(compiled, in_fp32):
    """Queries and keys of as many heads are compiled for once, forward and backward."""
    model = new_tower()
    model.config.apply_rotary_pos_emb_in_fp32 = in_fp32
    for module in model.modules():
        if hasattr(module, "q_layernorm"):
            module.q_layernorm = torch.nn.Identity()
            module.num_query_groups_per_partition = 1
    list(precompile.of_language_models((model.decoder,), 48))
    assert {name for name, *_ in compiled} == {"_rotate"}
    rotations = [(shapes[0][1:], s["SIGN"], s["ROUNDS"]) for name, shapes, s in compiled if name == "_rotate"]
    heads = {shape[0] for shape, *_ in rotations}
    assert len(rotations) == len(set(rotations)) == 2 * len(heads) and 1 in heads and len(heads) == 2
    assert all(rounds is not in_fp32 for *_, rounds in rotations)


def test_what_a_tower_compiles_is_named_once_for_each_kernel(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(precompile, "kernels_available", lambda: True)
    found, again = (list(precompile.compilations((tower(),), 48)) for _ in range(2))
    assert found == again and len(set(found)) == len(KERNELS) + 1, "and cuDNN's frontend"
    assert set(precompile.compilations((tower(),), 4096)) - set(found), "what depends on tokens is compiled for others"


def test_meta_tensors_compile_and_load_a_kernel():
    pytest.importorskip("triton")
    from bridge_cg_plugin.vision.kernels.launch import deferred, launch

    calls = []

    class Compiled:
        @property
        def run(self):
            calls.append("loaded")

    class Kernel:
        def warmup(self, *arguments, grid, **settings):
            calls.append((arguments, grid, settings))
            return Compiled()

        def __getitem__(self, grid):
            return lambda *arguments, **settings: calls.append("launched")

    x = torch.empty(4, device="meta")
    launch(Kernel(), (2,), x, 4, ROWS=8)
    assert calls == [((x, 4), (1,), {"ROWS": 8}), "loaded"]
    with deferred() as found:
        launch(Kernel(), (2,), torch.empty(4), 4, ROWS=8)
        launch(Kernel(), (2,), x, 4, ROWS=8)
    assert calls[2:] == ["launched"]
    found.pop()()
    assert calls[3:] == calls[:2] and not found
