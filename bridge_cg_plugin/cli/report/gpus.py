"""What GPUs can do at most."""

# Part of a GPU's name -> dense bf16 TFLOP/s of its SXM form, from its vendor's data sheet.
PEAK_TFLOPS = {"B300": 2250.0, "B200": 2250.0, "H200": 989.4, "H100": 989.4, "A100": 312.0}


def peak_tflops(name: str) -> float | None:
    """Return dense bf16 TFLOP/s of the GPU that PyTorch calls `name`; None for one that is not known."""
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name and "PCIe" not in name), None)
