"""The helpers that train loops drive: one for each part of a model that is on graphs."""
