"""Planning of buckets from a dataset's sizes and a measured cost model. Imports neither torch nor Megatron."""
