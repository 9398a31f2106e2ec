"""Kernels that compute what upstream's unfused operations compute, to the last bit, in fewer launches."""
