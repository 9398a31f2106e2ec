"""What the program of packed documents tells the engine."""

from types import SimpleNamespace

import pytest
import torch

from bridge_cg_plugin.graphs.buckets import Bucket
from bridge_cg_plugin.graphs.replays.slot import StaticTensors
from bridge_cg_plugin.language.packed.batch import OFFSETS, PackedBatch
from bridge_cg_plugin.language.packed.program import DecoderPart, PackedProgram, PackLayout

WIDTH, ROTATED = 4, 6


def program(shards=1, additions=0, exact_below=0, run=None, ranks=1, absolute=True, rotated=ROTATED, counted=False):
    family = SimpleNamespace(per_position=True, absolute=absolute, shards=shards, ranks=ranks, rank=0)
    layout = PackLayout(OFFSETS, rotated, WIDTH, torch.float32, family, additions)
    part = DecoderPart("p", torch.nn.Linear(1, 1), (), run, counted=counted)
    return PackedProgram(part, layout, exact_below=exact_below)


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
    buffers = StaticTensors(torch.device("cpu")).buffers(made.input_specs(bucket))
    for buffer in buffers.values():
        buffer.fill_(99)
    made.load(buffers, given)
    return buffers


def test_angles_go_by_the_document_unless_upstream_takes_them_by_the_place():
    bucket = Bucket(12, (4, 12))
    assert loaded(program(), batch(), bucket)["by_place"].item()
    assert not loaded(program(absolute=False), batch(), bucket)["by_place"].item()


def test_a_piece_that_asks_knows_how_many_tokens_are_no_padding():
    made, bucket = program(run=lambda pack: (pack.used,), counted=True), Bucket(12, (4, 7))
    buffers = loaded(made, batch(), bucket)
    assert made.forward(buffers, bucket)[0].tolist() == [8]
    made.load_example(buffers, bucket)
    assert buffers["used"].tolist() == [12]
    assert program(run=lambda pack: (pack.used,)).forward(loaded(program(), batch(), bucket), bucket) == (None,)
