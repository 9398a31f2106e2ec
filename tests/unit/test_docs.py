"""The documentation: links lead somewhere, and every fenced block runs or says why not."""

import ast
import contextlib
import importlib
import inspect
import io
import json
import re
import shlex
import subprocess
import unicodedata
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import bridge_cg_plugin
from bridge_cg_plugin.cli import main as cli
from bridge_cg_plugin.options.flags import FLAGS
from bridge_cg_plugin.options.graph_options import GROUPS
from bridge_cg_plugin.recipes import SMALL_RECIPES
from examples.photographs.arguments import LAYOUT

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PHOTOGRAPHS = ROOT / "examples" / "photographs"
RUNS = ROOT / "bridge_cg_plugin" / "cli" / "runs"
SITE = sorted(DOCS.rglob("*.md"))
PAGES = (*sorted(ROOT.glob("*.md")), *SITE)
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


# Tests that the page of known faults names


def named_tests():
    """Yield row, file and test ("" is none) of each reference; one without a file is to the file before it."""
    for row in (DOCS / "robustness.md").read_text().splitlines():
        file = ""
        for given, test in re.findall(r"`((?:\w+/)?test_\w+\.py)?(?:::(test_\w+))?`", row):
            file = given or file
            if given or test:
                yield row[:60], file, test


def test_every_test_that_robustness_names_exists():
    found = list(named_tests())
    assert len(found) > 40 and sum(bool(test) for _, _, test in found) > 40
    for row, file, test in found:
        path = ROOT / "tests" / (file if "/" in file else f"unit/{file}")
        assert file and path.is_file(), (row, file, test)
        assert not test or re.search(rf"^def {test}\(", path.read_text(), re.MULTILINE), (row, file, test)


def code_of(path):
    """Return a file's code without its docstrings and comments."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body[0] = ast.Pass()
    return ast.unparse(tree)


def test_robustness_names_every_option_that_no_gpu_test_sets():
    text = (DOCS / "robustness.md").read_text()
    said = re.search(r"<!-- not on a GPU -->(.*?)<!-- /not on a GPU -->", text, re.DOTALL)[1]
    words = {w for path in (ROOT / "tests" / "gpu").rglob("*.py") for w in re.findall(r"\w+", code_of(path))}
    fields = {(name, field) for group in GROUPS for name, field in group.fields.items()}
    unset = {field for name, field in fields if not {name, field.rpartition(".")[2]} & words}
    assert set(re.findall(r"`([\w.]+)`", said)) == unset


MOST_WORDS = 20_000


def test_the_documentation_is_short():
    """With tables and code."""
    words = {name_of(page): len(page.read_text().split()) for page in SITE}
    assert sum(words.values()) <= MOST_WORDS, sorted(words.items(), key=lambda item: -item[1])[:10]


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
# What a block of commands prints, where the block after it shows that.
OUTPUTS = {
    before: after
    for before, after in pairwise(BLOCKS)
    if after.language == "text" and before.language == "bash" and before.page == after.page
}
(SMALL,) = SMALL_RECIPES
LAYOUT_FLAGS = [f'"--{name}-parallel"' for name in LAYOUT]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_runs_or_says_why_not(block):
    runs = block.language in ("python", "bash") or (block.language == "text" and block in OUTPUTS.values())
    assert block.reason or runs, "mark it: <!-- not run: REASON -->"


# Python


PYTHON = [b for b in BLOCKS if b.language == "python"]


@pytest.mark.parametrize("block", [b for b in PYTHON if b.reason], ids=str)
def test_python_that_is_not_run_imports_and_calls_what_there_is(block):
    """It compiles; names that it imports and calls take the arguments that it gives."""
    tree = ast.parse(block.text)
    compile(tree, str(block), "exec")
    imported = {}
    for node in ast.walk(tree):
        for alias in node.names if isinstance(node, ast.Import) else ():
            importlib.import_module(alias.name)
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            imported |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        function = imported.get(call.func.id)
        if inspect.isfunction(function):
            given = {word.arg: None for word in call.keywords if word.arg}
            inspect.signature(function).bind(*[None] * len(call.args), **given)


@pytest.mark.parametrize("block", [b for b in PYTHON if not b.reason], ids=str)
def test_python_runs(block):
    """With `config`, `model` and `hidden` as a training script has them; it sets fields that there are."""
    bridge_cg_plugin.activate()
    config = SMALL_RECIPES[SMALL]()
    names = {"config": config, "model": config.model, "hidden": torch.zeros(2)}
    for node in ast.walk(ast.parse(block.text)):
        of_method = isinstance(node, ast.Attribute) and ast.unparse(node).startswith("self.")
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and not of_method:
            eval(ast.unparse(node), {"torch": torch, **names})
    exec(compile(block.text, str(block), "exec"), {"__name__": "block", **names})
    assert bridge_cg_plugin.status()["active"]


# Commands


def commands(block):
    """Return a shell block's commands in words, lines that go on with a backslash joined."""
    joined = block.text.replace("\\\n", " ")
    split = (shlex.split(line, comments=True) for line in joined.splitlines())
    return [words for words in split if words]


@pytest.mark.parametrize("block", [b for b in RUN if b.language == "bash"], ids=str)
def test_commands_run(block, monkeypatch):
    monkeypatch.chdir(ROOT)
    said = ""
    for name, *words in commands(block):
        if name == "python":
            main = importlib.import_module(words[0].removesuffix(".py").replace("/", ".")).main
            words = words[1:]
            assert "--dry-run" in words
        else:
            assert name == "bridge-cg", f"mark it, or write a command that is run here: {name}"
            main = cli.main
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            assert main(words) == 0, words
        assert out.getvalue().strip(), words
        said += out.getvalue()
    if block in OUTPUTS:
        assert said == OUTPUTS[block].text


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.reason and b.language == "bash"], ids=str)
def test_commands_that_are_not_run_exist_with_their_flags(block):
    if "Megatron-Bridge" in block.reason:
        return  # its scripts are not here
    for words in commands(block):
        source = source_of(words)
        flags = [word.partition("=")[0] for word in words if word.startswith("--")] if source else []
        assert all(f'"{flag}"' in source for flag in flags), words


def source_of(words):
    """Return the source of the project's program that a command starts, empty where it starts another one."""
    program = words[words.index("python") + 1 :] if "python" in words else words
    if program[0].startswith(("scripts/", "examples/")):
        return (ROOT / program[0]).read_text()
    if program[0] == "-m" and program[1].startswith("examples"):
        return (PHOTOGRAPHS / "arguments.py").read_text() + str(LAYOUT_FLAGS)
    if program[0] == "./run":
        assert re.search(rf"^  {program[1]}\b", (ROOT / "run").read_text(), re.MULTILINE), program
    if program[0] == "bridge-cg":
        assert program[1] in cli_commands()
        if program[1] in cli.TRAINING:
            read = "".join((RUNS / f"{name}.py").read_text() for name in ("recipe", "compare"))
            return read + "".join(f'"{s}"' for flag in FLAGS for s in flag.spellings)
    return ""


def cli_commands():
    out = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(out):
        cli.main(["--help"])
    return re.search(r"\{([\w,]+)\}", out.getvalue())[1].split(",")


def test_every_command_of_bridge_cg_is_in_the_documentation():
    names, text = cli_commands(), "".join(page.read_text() for page in PAGES)
    assert names and all(f"bridge-cg {name}" in text for name in names)


COMMIT = re.compile(r"(?<![\w.+-])(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}(?![\w.-])")
# Commits of other repositories: `docs/releases.md` names upstream's.
OTHERS = {"6124fbe38", "d98e8a64d", "d48bd6be0", "067f987df", "d0067d0da"}


def git(*words):
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)


def named():
    """Return every commit that is named, with the files that name it."""
    found = {}
    for page in (ROOT / "README.md", *SITE):
        for commit in COMMIT.findall(page.read_text()):
            found.setdefault(commit, set()).add(page.name)
    for file in (DOCS / "benchmarks").glob("*.jsonl"):
        for line in file.read_text().splitlines():
            found.setdefault(json.loads(line)["versions"]["commit"], set()).add(file.name)
    return {commit: sorted(files) for commit, files in found.items() if commit not in OTHERS}


def test_every_named_commit_is_an_ancestor():
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("there is no history here: an unpacked archive, or a shallow clone")
    found = named()
    assert len(found) > 10
    strangers = {c: files for c, files in found.items() if git("merge-base", "--is-ancestor", c, "HEAD").returncode}
    assert strangers == {}
