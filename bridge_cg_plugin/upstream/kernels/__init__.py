"""The plugin's kernels in megatron-core's and Transformer Engine's layers while a region is recorded."""
