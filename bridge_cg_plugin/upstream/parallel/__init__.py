"""Megatron's ranks: data parallelism, pipelines, process groups, the watchdog."""
