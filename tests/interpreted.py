"""What the kernels need to run in Triton's interpreter, for processes started with TRITON_INTERPRET=1."""

import triton.runtime.interpreter as interpreter


def prepare() -> None:
    """Read loop bounds as new numpy accepts it, and give the kernels a reciprocal: it has no inline assembly."""
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch
    from bridge_cg_plugin.vision.kernels import tanh

    tanh.reciprocal = _reciprocal


def _reciprocal(x):
    return 1.0 / x
