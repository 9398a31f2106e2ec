"""The only place that names Bridge's and megatron-core's internals: seams, patches, versions."""
