"""The page of a run: what training runs did, beside each other, as a terminal table, Markdown and JSON."""
