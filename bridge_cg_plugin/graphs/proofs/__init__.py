"""Replays compared with eager while training runs."""
