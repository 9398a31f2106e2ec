"""Where the kernels of experts run."""

from torch import Tensor


def runs_kernels(tensor: Tensor) -> bool:
    """Whether a tensor is where Triton's kernels run; elsewhere PyTorch's functions compute the same."""
    return tensor.is_cuda
