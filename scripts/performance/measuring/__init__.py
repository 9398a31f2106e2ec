"""Times, kernels, arithmetic, and what a machine gives to runs."""
