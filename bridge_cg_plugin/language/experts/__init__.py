"""Experts that get their tokens by counts that stay on the device. Knows torch, no model and no Bridge."""
