"""Commands: benchmarks and parity runs, whose results go to docs/benchmarks, and training of recipes."""
