"""The graph engine: regions, buckets, slots, capture and replay. Knows torch and nothing about a model."""
