"""The models that benchmarks run, the ways to run them, and what they are given."""
