import pytest

from bridge_cg_plugin import __version__
from bridge_cg_tools.cli import main


def test_the_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"bridge-cg {__version__}\n"


@pytest.mark.parametrize(
    "words, nearest",
    [
        (["docter"], "doctor"),
        (["plan", "packd", "lengths.json"], "packed"),
        (["explain", "some_recipe", "--graphs", "h20"], "h200"),
        (["doctor", "--jsn"], "--json"),
        (["plan", "packed", "lengths.json", "--pak-size", "4"], "--pack-size"),
        (["plan", "vision", "sizes.json", "--max-pixles=4"], "--max-pixels"),
    ],
)
def test_a_mistyped_word_names_the_nearest(capsys, words, nearest):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2 and f"Did you mean {nearest}?" in capsys.readouterr().err
