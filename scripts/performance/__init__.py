"""Benchmarks and parity runs; their results go to docs/benchmarks."""
