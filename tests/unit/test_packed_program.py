"""What the program of packed documents tells the engine."""

from dataclasses import replace

import pytest
import torch

from bridge_cg_plugin.graphs.planning.buckets import Bucket
from bridge_cg_plugin.graphs.replays.slot import Arena
from bridge_cg_plugin.language.packed.batch import OFFSETS, PADDED_OFFSETS, PackedBatch
from bridge_cg_plugin.language.packed.program import PackedProgram, PackLayout

WIDTH, ROTATED = 4, 6


def program(shards=1, additions=0, exact_below=0, run=None, ranks=1, absolute=True, rotated=ROTATED):
    layout = PackLayout(OFFSETS, rotated, absolute=absolute, shards=shards, ranks=ranks, additions=additions)
    return PackedProgram(
        "p", lambda: [torch.nn.Linear(1, 1)], WIDTH, torch.float32, layout, run, exact_below=exact_below
    )


def batch(lengths=(3, 5), shards=1, additions=0, rows: int | None = 8, ranks=1):
    tokens = sum(lengths)
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return PackedBatch(
        torch.full((tokens // (shards * ranks), 1, WIDTH), 2.0),
        None if rows is None else torch.full((rows, 1, 1, ROTATED), 3.0),
        dict.fromkeys(OFFSETS, ends),
        tuple(lengths),
        tokens,
        tuple(torch.full((tokens, 1, WIDTH), 4.0 + i) for i in range(additions)),
    )


@pytest.mark.parametrize(
    "made, given, bucket, reason",
    [
        (program(), batch(), Bucket(8, (2, 5)), None),
        (program(), batch(), Bucket(16, (2, 8)), None),
        (program(), batch(), Bucket(8, (1, 8)), "too_many_documents"),
        (program(), batch(), Bucket(8, (2, 4)), "document_too_long"),
        (program(exact_below=8), batch(), Bucket(16, (2, 8)), "too_few_tokens"),
        (program(exact_below=8), batch(), Bucket(8, (2, 8)), None),
        (program(shards=2), batch(shards=2), Bucket(8, (2, 8)), None),
        (program(shards=2), batch(shards=2), Bucket(16, (2, 8)), "sharded_tokens"),
        (program(), batch(additions=1), Bucket(8, (2, 8)), "other_layout"),
        (program(additions=2), batch(additions=1), Bucket(8, (2, 8)), None),
        (program(rotated=0), batch(rows=None), Bucket(8, (2, 8)), None),
        (program(rotated=0), batch(), Bucket(8, (2, 8)), "other_layout"),
        (program(), batch(rows=None), Bucket(8, (2, 8)), "other_layout"),
        (program(ranks=2), batch((4, 8), ranks=2), Bucket(16, (2, 8)), None),
        (program(ranks=2), batch((4, 8), ranks=2), Bucket(24, (2, 8)), "document_too_long"),  # 12 tokens of padding
        (program(ranks=2, exact_below=6), batch((4, 8), ranks=2), Bucket(16, (2, 8)), "too_few_tokens"),
    ],
)
def test_which_batches_a_bucket_takes(made, given, bucket, reason):
    assert made.refuse(given, bucket) == reason


def loaded(made, given, bucket):
    buffers = Arena(torch.device("cpu")).buffers(made.input_specs(bucket))
    for buffer in buffers.values():
        buffer.fill_(99)
    made.load(buffers, given)
    return buffers


@pytest.mark.parametrize("rows", [3, 8, 12, 40])
def test_every_buffer_is_written_to_its_end(rows):
    buffers = loaded(program(additions=2), batch(additions=1, rows=rows), Bucket(12, (4, 12)))
    hidden, angles = buffers["hidden"][:, 0, 0], buffers["angles"][:, 0, 0, 0]
    assert hidden.tolist() == [2.0] * 8 + [0.0] * 4
    assert angles.tolist() == [3.0] * min(rows, 12) + [0.0] * max(12 - rows, 0)
    assert buffers["by_place"].tolist() == [rows == 8]
    assert buffers["addition_0"][:, 0, 0].tolist() == [4.0] * 8 + [0.0] * 4
    assert not buffers["addition_1"].any()
    assert all(buffers[name].tolist() == [0, 3, 8, 8, 8] for name in OFFSETS)


def test_shards_hold_their_part_of_the_tokens():
    buffers = loaded(program(shards=2), batch(shards=2), Bucket(8, (2, 8)))
    assert buffers["hidden"].shape == (4, 1, WIDTH) and buffers["angles"].shape[0] == 8


def test_angles_go_by_the_document_unless_upstream_takes_them_by_the_place():
    bucket = Bucket(12, (4, 12))
    assert loaded(program(), batch(), bucket)["by_place"].item()
    assert not loaded(program(absolute=False), batch(), bucket)["by_place"].item()


def test_padding_is_a_document_where_ranks_share_documents():
    buffers = loaded(program(ranks=2), batch((4, 8), ranks=2, rows=12), Bucket(16, (4, 16)))
    assert buffers["hidden"].shape == (8, 1, WIDTH) and buffers["angles"].shape[0] == 16
    assert all(buffers[name].tolist() == [0, 4, 12, 16, 16, 16] for name in OFFSETS)
    assert buffers["by_place"].item()


def test_only_room_is_given_to_padding_where_documents_have_room():
    names = (*OFFSETS, *PADDED_OFFSETS)
    made = PackedProgram(
        "p", lambda: [torch.nn.Linear(1, 1)], WIDTH, torch.float32, PackLayout(names, ROTATED, ranks=2), None
    )
    given = batch((4, 8), ranks=2)
    short = torch.tensor([0, 3, 9], dtype=torch.int32)
    given = replace(
        given, offsets={**dict.fromkeys(OFFSETS, short), **dict.fromkeys(PADDED_OFFSETS, given.offsets[OFFSETS[0]])}
    )
    buffers = loaded(made, given, Bucket(16, (4, 16)))
    assert all(buffers[name].tolist() == [0, 3, 9, 9, 9, 9] for name in OFFSETS)
    assert all(buffers[name].tolist() == [0, 4, 12, 16, 16, 16] for name in PADDED_OFFSETS)


def test_the_piece_sees_buffers_and_the_bound_alone():
    seen = {}

    def run(pack):
        seen.update(angles=pack.angles, offsets=pack.offsets, longest=pack.longest)
        return (pack.hidden + pack.additions[0],)

    made, bucket = program(additions=1, run=run), Bucket(12, (4, 7))
    buffers = loaded(made, batch(additions=1), bucket)
    (output,) = made.forward(buffers, bucket)
    assert torch.equal(output, buffers["hidden"] + buffers["addition_0"])
    assert seen["longest"] == 7 and seen["offsets"].keys() == set(OFFSETS)
    assert seen["angles"].shape == (12, 1, 1, ROTATED)
    assert made.output_rows(batch()) == (8,)


def test_a_piece_that_rotates_nothing_gets_no_angles():
    made, bucket = program(rotated=0, run=lambda pack: (pack.hidden, pack.angles)), Bucket(12, (4, 7))
    buffers = loaded(made, batch(rows=None), bucket)
    assert buffers.keys() == {"hidden", *OFFSETS}
    made.load_example(buffers, bucket)
    assert made.forward(buffers, bucket) == (buffers["hidden"], None)


def test_a_piece_that_asks_knows_how_many_tokens_are_no_padding():
    made = program(run=lambda pack: (pack.used,))
    made.layout, bucket = replace(made.layout, counted=True), Bucket(12, (4, 7))
    buffers = loaded(made, batch(), bucket)
    assert made.forward(buffers, bucket)[0].tolist() == [8]
    made.load_example(buffers, bucket)
    assert buffers["used"].tolist() == [12]
    assert program(run=lambda pack: (pack.used,)).forward(loaded(program(), batch(), bucket), bucket) == (None,)


def test_example_values_fill_the_bucket_as_far_as_its_bound():
    made, bucket = program(additions=1), Bucket(12, (4, 7))
    buffers = loaded(made, batch(), bucket)
    made.load_example(buffers, bucket)
    assert all(buffers[name].tolist() == [0, 7, 7, 7, 7] for name in OFFSETS)
    assert not any(buffers[name].any() for name in ("hidden", "addition_0", "angles"))


@pytest.mark.parametrize("longest, expected", [(16, [0, 16, 16, 16, 16, 16]), (7, [0, 4, 8, 12, 16, 16])])
def test_example_documents_of_several_ranks_reach_the_end_in_whole_chunks(longest, expected):
    made, bucket = program(ranks=2), Bucket(16, (4, longest))
    buffers = loaded(made, batch((4, 8), ranks=2), bucket)
    made.load_example(buffers, bucket)
    assert all(buffers[name].tolist() == expected for name in OFFSETS)
