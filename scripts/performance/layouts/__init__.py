"""Training over several GPUs: layouts, the runs of each, their records."""
