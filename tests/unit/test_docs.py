"""The documentation: links lead somewhere, and every fenced block runs or says why not."""

import ast
import contextlib
import importlib
import inspect
import io
import re
import shlex
import unicodedata
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from bridge_cg_plugin import cli

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- not run: (.+) -->\n$")
LINK = re.compile(r"(?<!`)!?\[[^\]\[]*\]\(([^)\s]+)\)")


def name_of(page):
    return str(page.relative_to(ROOT))


def headings(page):
    """Return the anchors of a page's headings, as the site and GitHub make them."""
    text = FENCE.sub("", page.read_text())
    found = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", unicodedata.normalize("NFKD", h)).strip().lower() for h in found]
    return {re.sub(r"[-\s]+", "-", h) for h in plain}


def links(page):
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text()))
    return [link for link in LINK.findall(text) if not re.match(r"[a-z]+:", link)]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_a_file_and_a_heading(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} leads nowhere"
        assert page.parent == ROOT or target.is_file(), f"{link} is a folder; the site has pages only"
        assert not anchor or anchor in headings(target), f"{link}: no such heading"


def test_links_are_found_at_all():
    assert "drawings/slots.svg" in links(DOCS / "vision_graphs.md")
    assert "errors.md#fallbacks" in links(DOCS / "vision_graphs.md")
    assert "measured-costs" in headings(DOCS / "design.md")


# The site


def navigation(entries):
    for entry in entries:
        (value,) = entry.values()
        yield from navigation(value) if isinstance(value, list) else [value]


def site():
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def test_the_navigation_has_every_page_once():
    left_out = site()["exclude_docs"].split()
    pages = sorted(str(page.relative_to(DOCS)) for page in PAGES[1:])
    assert sorted([*navigation(site()["nav"]), *left_out]) == pages


def test_the_site_needs_no_network():
    assert site()["theme"]["font"] is False
    for drawing in DOCS.rglob("*.svg"):
        assert not re.search(r'href="(?!#)|@import', drawing.read_text()), drawing


def test_the_sites_packages_are_pinned():
    lines = [line for line in (ROOT / "requirements/docs.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    assert any(line.startswith("mkdocs-material==") for line in lines)


# Fenced blocks


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    reason: str

    def __str__(self):
        return f"{name_of(self.page)}:{self.line}"


def blocks(page):
    text = page.read_text()
    for found in FENCE.finditer(text):
        before = text[: found.start()]
        mark = MARK.search(before)
        yield Block(page, before.count("\n") + 1, found[1], found[2], mark[1] if mark else "")


BLOCKS = [block for page in PAGES for block in blocks(page)]
RUN = [block for block in BLOCKS if not block.reason]


def test_marks_stand_before_blocks():
    for page in PAGES:
        assert page.read_text().count("<!-- not run:") == sum(bool(block.reason) for block in blocks(page)), page


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_runs_or_says_why_not(block):
    assert block.reason or block.language in ("python", "bash"), "mark it: <!-- not run: REASON -->"


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "python"], ids=str)
def test_python_compiles_and_what_it_imports_exists(block):
    tree = ast.parse(block.text)
    compile(tree, str(block), "exec")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "python"], ids=str)
def test_python_calls_have_arguments_that_exist(block):
    """Names that a block imports and calls take the arguments that it gives."""
    tree = ast.parse(block.text)
    imported = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            imported |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        function = imported.get(call.func.id)
        if inspect.isfunction(function):
            given = {word.arg: None for word in call.keywords if word.arg}
            inspect.signature(function).bind(*[None] * len(call.args), **given)


def commands(block):
    """Return a shell block's commands, lines that go on with a backslash joined."""
    joined = block.text.replace("\\\n", " ")
    return [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]


@pytest.mark.parametrize("block", [b for b in RUN if b.language == "bash"], ids=str)
def test_commands_run(block, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    for line in commands(block):
        name, *words = shlex.split(line)
        assert name == "bridge-cg", f"mark it, or write a command that is run here: {line}"
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            assert cli.main(words) == 0, line
        assert out.getvalue().strip(), line


def test_every_command_of_bridge_cg_is_in_the_documentation(capsys):
    with contextlib.suppress(SystemExit):
        cli.main(["--help"])
    names = re.search(r"\{([\w,]+)\}", capsys.readouterr().out)[1].split(",")
    text = "".join(page.read_text() for page in PAGES)
    assert names and all(f"bridge-cg {name}" in text for name in names)
