import json

import pytest

from bridge_cg_plugin.cli.main import main


@pytest.mark.parametrize(
    "words, nearest",
    [
        (["docter"], "doctor"),
        (["plan", "packd", "lengths.json"], "packed"),
        (["explain", "some_recipe", "--graphs", "h20"], "h200"),
        (["doctor", "--jsn"], "--json"),
        (["plan", "packed", "lengths.json", "--pak-size", "4"], "--pack-size"),
    ],
)
def test_a_mistyped_word_names_the_nearest(capsys, words, nearest):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2 and f"Did you mean {nearest}?" in capsys.readouterr().err


def test_recipes_by_a_part_of_their_name(capsys):
    assert main(["recipes", "qwen3_vl_8b"]) == 0
    presets, others = capsys.readouterr().out.split("recipes of Megatron-Bridge\n")
    assert "  qwen3_vl_8b_vision_graphs_h200_sft_config\n" in presets
    assert "  qwen3_vl_8b_sft_config\n" in others and "graphs" not in others
    assert main(["recipes", "--json", "small_vision"]) == 0
    assert json.loads(capsys.readouterr().out)["presets"] == ["qwen3_vl_small_vision_graphs_pretrain_mock_config"]
    assert main(["recipes", "no_such_name"]) == 2
    remedy = "Write another part of it; bridge-cg recipes lists all."
    assert capsys.readouterr().err == f"Cannot find a recipe with 'no_such_name' in its name. {remedy}\n"


def test_what_has_gone_says_what_is_there_instead(capsys):
    assert main(["plan", "vision", "sizes.json"]) == 2
    assert "captured on demand" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "compare"])
def test_commands_with_a_parser_of_their_own(capsys, command):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0 and f"usage: bridge-cg {command}" in said and "--recipe" in said
    try:
        status = main([command])
    except SystemExit as ended:
        status = ended.code
    assert status == 2 and "--recipe" in capsys.readouterr().err
