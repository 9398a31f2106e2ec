"""Words of verl's and NeMo-RL's command lines as Bridge's."""

import argparse
import difflib
import re
from collections.abc import Collection, Sequence

_MODEL = re.compile(
    r"\+*(?:actor_rollout_ref\.actor\.megatron(?:\.override_transformer_config)?|policy\.megatron_cfg)"
    r"\.([\w.]+)=(.*)",
    re.DOTALL,
)
_OTHERS = (
    *("actor_rollout_ref", "algorithm", "critic", "cluster", "data"),
    *("grpo", "loss_fn", "policy", "reward", "trainer"),
)
_PLACES = {
    **dict.fromkeys(("trainer.nnodes", "cluster.num_nodes"), "nodes"),
    **dict.fromkeys(("trainer.n_gpus_per_node", "cluster.gpus_per_node"), "gpus_per_node"),
}


def as_bridges(words: Sequence[str], place: argparse.Namespace, fields: Collection[str]) -> tuple[list[str], list[str]]:
    """Return words with those of other loops in Bridge's spelling, and the words that say nothing of graphs.

    Args:
        words: Of a command line.
        place: Gets what words say of machines and GPUs.
        fields: What the model has; a name that is nearly one of them is taken for a misspelt one.
    """
    found, left = [], []
    for word in words:
        name, _, value = word.lstrip("+~").partition("=")
        if name in _PLACES and value.isdecimal():
            setattr(place, _PLACES[name], int(value))
        elif (match := _MODEL.fullmatch(word)) and difflib.get_close_matches(
            match[1].partition(".")[0], fields, 1, 0.9
        ):
            found.append(f"model.{match[1]}={match[2]}")
        elif name.partition(".")[0] in _OTHERS:
            left.append(name)
        else:
            found.append(word)
    return found, left
