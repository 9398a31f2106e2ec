"""What the kernels need to run in Triton's interpreter, for processes started with TRITON_INTERPRET=1."""

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter


def prepare() -> None:
    """Make up for what the interpreter lacks.

    It reads loop bounds as new numpy does not accept it, has no inline assembly for the kernels' reciprocal and no
    functions of CUDA's library, and multiplies the bits of bfloat16.
    """
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
