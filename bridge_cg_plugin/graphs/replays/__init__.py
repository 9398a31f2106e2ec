"""Replaying a recording: slots, the autograd node, gradients, streams."""
