"""Measurements of vision encoders."""
