"""The README as a package index shows it. Everything else about the package is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup

README = Path(__file__).with_name("README.md")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
# An index has neither the files nor the anchors that relative links lead to.
RELATIVE = r"(?!https?:|mailto:)"
REPLACED = (
    (re.compile(r"<!--.*?-->\n?", re.DOTALL), ""),
    (re.compile(r"<picture>.*?</picture>\n?", re.DOTALL), ""),
    (re.compile(rf'<img\b[^>]*\bsrc="{RELATIVE}[^>]*>\n?'), ""),
    (re.compile(rf"!\[[^\]]*\]\({RELATIVE}[^)]*\)\n?"), ""),
    (re.compile(rf"\[([^\]]+)\]\({RELATIVE}[^)\s]+\)"), r"\1"),
)
DOCUMENTATION = "\nThe documentation is the folder `docs` of the source distribution.\n"


def index_page(text: str) -> str:
    """Return the README without comments, relative pictures and relative links; code stays as it is."""
    parts = FENCE.split(text)
    for number in range(0, len(parts), 2):
        for pattern, replacement in REPLACED:
            parts[number] = pattern.sub(replacement, parts[number])
    return "".join(parts) + DOCUMENTATION


setup(long_description=index_page(README.read_text(encoding="utf-8")), long_description_content_type="text/markdown")
