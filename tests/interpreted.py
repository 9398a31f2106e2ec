"""What the kernels need to run in Triton's interpreter, for processes started with TRITON_INTERPRET=1."""

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.language.core import is_builtin


def prepare() -> None:
    """Make up for what the interpreter lacks.

    It reads loop bounds as new numpy does not accept it, has no inline assembly for the kernels' reciprocal and no
    functions of CUDA's library, and multiplies the bits of bfloat16. It remaps the language in each call of a function,
    which the launch has done.
    """
    patch_lang = interpreter._patch_lang

    def patch_once(fn):
        used = [lang for lang in (tl, tl.core) if lang in fn.__globals__.values()]
        return patch_lang(fn) if any(is_builtin(lang.load) for lang in used) else interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch
    create_dot = interpreter.InterpreterBuilder.create_dot
    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, *rest: create_dot(self, _wide(a), _wide(b), *rest)
    from bridge_cg_plugin.vision.kernels import bias

    bias.reciprocal = _reciprocal


def _reciprocal(x):
    return 1.0 / x


def _wide(operand):
    """Return a product's operand in fp32 if it is the bits of bfloat16."""
    if operand.dtype.scalar is not tl.bfloat16:
        return operand
    return interpreter.TensorHandle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
