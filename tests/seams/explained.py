"""What `bridge-cg explain` prints."""

import json

from bridge_cg_plugin.cli.main import main


def explain(capsys, *words):
    status = main(["explain", *words])
    out, err = capsys.readouterr()
    return status, out, err


def table(capsys, *words):
    """Return the lines of the table by their parts."""
    return {line["part"]: line for line in found(capsys, *words)["table"]}


def found(capsys, *words):
    status, out, err = explain(capsys, "--json", *words)
    assert status == 0, err
    return json.loads(out)
