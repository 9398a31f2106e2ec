"""The page of a run: what training runs did, beside each other, as a terminal table, Markdown, JSON and HTML.

Imports neither torch nor Megatron.
"""
