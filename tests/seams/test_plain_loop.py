"""The example of a loop of its own: short, of one module of the project, with the call of Qwen3-VL as it is."""

import ast
import inspect
from pathlib import Path

import pytest
import torch
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.model import Qwen3VLModel

from examples import plain_loop

SOURCE = Path(plain_loop.__file__).read_text()


def test_a_reader_can_copy_it():
    assert len(SOURCE.splitlines()) <= 80
    imports = [node for node in ast.walk(ast.parse(SOURCE)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [getattr(node, "module", None) or node.names[0].name for node in imports]
    assert [name for name in names if name.startswith(("bridge_cg_plugin", "examples", "scripts", "tests"))] == [
        "bridge_cg_plugin"
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_ends_before_it_asks_the_hub(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["plain_loop.py"])
    with pytest.raises(SystemExit):
        plain_loop.main()
    assert "it needs an NVIDIA GPU" in capsys.readouterr().err


def test_its_step_calls_qwen3_vl():
    tokens = torch.tensor([[5, 6, 7, 8]])
    batch = {"input_ids": tokens, "pixel_values": torch.ones(4, 6), "image_grid_thw": torch.tensor([[1, 2, 2]])}

    def model(*args, **kwargs):
        call = inspect.signature(Qwen3VLModel.forward).bind(None, *args, **kwargs).arguments
        assert call["labels"].tolist() == [[6, 7, 8, 5]] and call["pixel_values"] is batch["pixel_values"]
        return torch.where(call["loss_mask"] > 0, 3.0, 1e9)  # what is masked does not count

    losses, loss_of = plain_loop.caption_step(iter([batch]), model)
    loss, told = loss_of(losses)
    assert loss == told["loss"] == 3
