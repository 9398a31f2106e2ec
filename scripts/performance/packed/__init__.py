"""Measurements and training of language models over packed documents."""
