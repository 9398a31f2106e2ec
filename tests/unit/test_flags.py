import argparse
import re

import pytest

from bridge_cg_plugin.options import OptionError, normalize
from bridge_cg_plugin.options.flags import (
    FLAGS,
    add_flags,
    as_typed,
    given_flags,
    take_flags,
    unknown_flag,
)
from bridge_cg_plugin.options.graph_options import TUNING
from bridge_cg_plugin.options.sources import FIELDS


def parse(*words):
    parser = argparse.ArgumentParser()
    parser.add_argument("--other", default=1)
    add_flags(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize("flag", FLAGS, ids=lambda f: f.name)
def test_both_spellings_set_the_field(flag):
    assert flag.field in (*FIELDS, *TUNING)
    found = [given_flags(parse(spelling, "attn_norm")) for spelling in flag.spellings]
    assert all(one == found[0] and one[flag.field] == "attn_norm" for one in found)
    assert {flag.name, flag.name.replace("_", "-")} <= {s.removeprefix("--") for s in flag.spellings}


def test_a_parser_with_a_flag_of_that_name_keeps_it_or_gives_way():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cuda_graph_impl", type=int)
    with pytest.raises(argparse.ArgumentError, match="conflicting"):
        add_flags(parser)
    parser = argparse.ArgumentParser()
    parser.add_argument("--cuda_graph_impl", type=int)
    add_flags(parser, replace=True)
    assert given_flags(parser.parse_args(["--cuda_graph_impl", "full_iteration"])) == {
        "cuda_graph_impl": "full_iteration"
    }
    assert parser.conflict_handler == "error"


def test_an_unknown_flag_names_the_nearest():
    assert "--vision_cuda_graph_impl" in str(unknown_flag("--vision-cuda-graph-imp=x", ["--vision_cuda_graph_impl"]))
    with pytest.raises(OptionError, match="Cannot use offload='--offload': the option has gone"):
        unknown_flag("--offload", [])


def test_parts_of_a_mapping_add_up_and_words_win_over_flags():
    tuning = "vision_cuda_graph_tuning"
    words = ["--vision-cuda-graph-tuning", "slots=2", "--vision_cuda_graph_tuning", "kernels=exact"]
    parser = argparse.ArgumentParser()
    add_flags(parser)
    assert given_flags(parser.parse_args(words)) == {tuning: "slots=2,kernels=exact"}
    found, rest = take_flags([*words, f"model.{tuning}.slots=4", f"{tuning}=max_frames=2", "train.train_iters=5"])
    options = normalize(found)[0].vision
    assert (options.slots, options.kernels, options.max_frames) == (4, "exact", 2) and rest == ["train.train_iters=5"]


@pytest.mark.parametrize(
    "word, said",
    [
        ("vision_cuda_graph_tunning.slots=2", "Did you mean vision_cuda_graph_tuning.NAME=VALUE"),
        ("vision_cuda_graph_tuning.slots.x=2", "has no parts"),
    ],
)
def test_a_word_under_a_misspelt_mapping_is_refused(word, said):
    with pytest.raises(OptionError, match=re.escape(said)):
        normalize([word])


@pytest.mark.parametrize(
    "words, field, value, said",
    [
        ("--max-packed-seqs x", "cuda_graph_max_packed_seqs", "x", "--max-packed-seqs x"),
        ("--cuda_graph_impl=foo", "cuda_graph_impl", "foo", "--cuda_graph_impl foo"),
        ("--vision_cuda_graph_buckets 3,8", "vision_cuda_graph_buckets", 3, "--vision_cuda_graph_buckets 3"),
        (
            "--vision_cuda_graph_tuning slots=0",
            "vision_cuda_graph_tuning.slots",
            0,
            "--vision_cuda_graph_tuning slots=0",
        ),
        ("--mock-data", "mock_data", True, "--mock-data"),
        ("cuda_graph_impl=foo", "cuda_graph_impl", "foo", "cuda_graph_impl='foo'"),
        ("--cuda_graph_impl local model.cuda_graph_impl=foo", "cuda_graph_impl", "foo", "cuda_graph_impl='foo'"),
        ("--cuda_graph_impl local", "rng.te_rng_tracker", False, "rng.te_rng_tracker=False"),
    ],
)
def test_an_error_names_a_value_as_it_was_typed(words, field, value, said):
    error = OptionError(field, value, "another", "Correct it.")
    assert as_typed(error, words.split()) == f"Cannot use {said}: it must be another. Correct it."
