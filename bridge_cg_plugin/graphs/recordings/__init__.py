"""Recording a region: executors, warm-up passes, CUDA graphs."""
