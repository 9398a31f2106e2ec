"""Graphs whose activations are offloaded or recomputed: replays and training."""
