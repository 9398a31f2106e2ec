"""What Transformer Engine's context parallelism over packed documents asks the host: nothing, so it can be recorded.

The ring (`cp_comm_type` p2p) and the exchange of tokens for heads (a2a) with cuDNN's attention, which is what
packed-sequence graphs record. Their kernels need a GPU; what they compute around them runs here, on tensors without
values, where whatever reads one raises.
"""

import inspect
import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from transformer_engine.pytorch.attention.dot_product_attention import backends, context_parallel, utils

from bridge_cg_plugin.upstream.decoder.layers import orders_on_device

READS = re.compile(r"\.(item|cpu|tolist|numpy|nonzero)\(|torch\.(equal|allclose|nonzero|masked_select)\(|synchronize\(")
# Steps of the ring, forward and backward, and what stands around it.
STEPS = (
    context_parallel.AttnFuncWithCPAndKVP2P,
    context_parallel.attn_forward_func_with_cp,
    context_parallel.cp_p2p_fwd_prepare_qkv,
    context_parallel.cp_p2p_fwd_fused_attn,
    context_parallel.cp_p2p_bwd_prepare_qkv,
    context_parallel.cp_p2p_bwd_fused_attn,
    context_parallel.flash_attn_p2p_communicate,
    context_parallel._zero_thd_padding,
    utils.get_thd_padding_mask,
    backends.FusedAttention.forward,
)

# Steps of the exchange of tokens for heads. Older releases order tokens on the host, and are refused.
HEAD_STEPS = (
    "AttnFuncWithCPAndQKVOA2A",
    "flash_attn_a2a_communicate",
    "get_seq_chunk_ids_for_reordering_before_attn",
    "get_seq_chunk_ids_for_reordering_after_attn",
    "thd_cp_rank_order_to_sequence_order",
    "thd_sequence_order_to_cp_rank_order",
)


def offsets(*values, device="meta"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def reads(step):
    return [line.strip() for line in inspect.getsource(step).splitlines() if READS.search(line)]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_no_step_reads_the_device(step):
    assert reads(step) == []


class _Sent:
    def wait(self):
        return True


@pytest.mark.skipif(not orders_on_device(), reason="this release orders tokens on the host")
def test_tokens_are_given_for_heads_on_the_device(monkeypatch):
    """Shapes come from shapes alone: tensors without values go through, forward and back."""
    ordered = []

    def reorder(x, cu_seqlens, ranks, tokens):
        ordered.append((x.shape[0] == tokens, cu_seqlens.is_meta, ranks))
        return torch.empty_like(x)

    for name in HEAD_STEPS[4:]:
        monkeypatch.setattr(context_parallel.tex, name, reorder)
    monkeypatch.setattr(torch.distributed, "all_to_all_single", lambda *args, **kwargs: _Sent())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(wait_stream=lambda other: None))
    cu_seqlens = offsets(0, 8, 16)
    given = [torch.empty(8, heads, 4, device="meta") for heads in (4, 2, 2)]
    common = {"qkv_format": "thd", "cu_seqlens_q_padded": cu_seqlens, "cu_seqlens_kv_padded": cu_seqlens}
    exchange = context_parallel.flash_attn_a2a_communicate
    taken = exchange(given, None, 0, 2, None, None, True, a2a_input_names=["q", "k", "v"], **common)
    assert [each.shape for each in taken] == [(16, 2, 4), (16, 1, 4), (16, 1, 4)]
    back = exchange(taken[0], None, 0, 2, None, None, False, a2a_input_names=["out"], **common)
    assert back.shape == (8, 4, 4) and ordered == [(True, True, 2)] * 4


@pytest.mark.parametrize("section", ["diagonal", "lower-triangle", "upper-triangle"])
@pytest.mark.parametrize("gaps", [False, True])
def test_offsets_of_a_step_are_made_on_the_device(monkeypatch, section, gaps):
    halves = []

    def read_half(tensor, cu_seqlens, half):
        halves.append(half)
        return tensor.new_empty(tensor.shape[0] // 2, *tensor.shape[1:])

    monkeypatch.setattr(context_parallel.tex, "thd_read_half_tensor", read_half)
    monkeypatch.setattr(
        context_parallel, "get_cu_seqlens_on_cp_rank", inspect.unwrap(context_parallel.get_cu_seqlens_on_cp_rank)
    )
    given = [torch.empty(8, 2, 4, device="meta") for _ in range(3)]
    cu_seqlens, padded = offsets(0, 3, 16, 16), offsets(0, 2, 8, 8)
    made = context_parallel.cp_p2p_fwd_prepare_qkv(
        *given, "thd", gaps, cu_seqlens, cu_seqlens, padded, padded, None, None, 0, 1, 2, section
    )
    assert [each.shape for each in made[3:]] == [(4,), (4,)] and all(each.is_meta for each in made[3:])
    assert halves == {"diagonal": [], "lower-triangle": [0, 0], "upper-triangle": [1]}[section]


def test_a_token_behind_the_last_offset_is_out_of_bounds():
    """Why padding is a document under context parallelism; once this passes it may lie behind the last offset again."""
    cu_seqlens = offsets(0, 4, 8, device="cpu")
    assert not utils.get_thd_padding_mask(8, cu_seqlens, cu_seqlens).any()
    with pytest.raises(IndexError):
        utils.get_thd_padding_mask(9, cu_seqlens, cu_seqlens)
