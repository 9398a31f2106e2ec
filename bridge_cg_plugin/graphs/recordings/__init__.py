"""Recording a region: executors, warm-up passes, kernels compiled ahead, CUDA graphs."""
