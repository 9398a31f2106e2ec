"""Benchmarks and parity runs, whose results go to docs/benchmarks, and what they share."""
