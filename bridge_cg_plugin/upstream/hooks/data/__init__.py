"""Batches on their way into the model, and what lies between encoder and language model."""
