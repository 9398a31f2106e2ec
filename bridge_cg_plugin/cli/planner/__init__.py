"""Planning of buckets from a dataset's sizes and measured ratios. Imports neither torch nor Megatron."""
