"""megatron-core's decoder layers over packed documents, experts and Mamba among them."""
