"""Training of Qwen3-VL on photographs through Bridge's `pretrain()`."""
