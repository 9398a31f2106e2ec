"""Which gradients a backward from each output computes: autograd gives nothing for those that it does not reach."""

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from .side_stream import Root


def reach_of(
    roots: Sequence[Root | None], targets: Mapping[int, Tensor], links: Mapping[Node, Node]
) -> tuple[frozenset[int], ...]:
    """Return the places of the targets that a backward from each root reaches; None has no backward.

    A function that gives an input no gradient counts as one that does: only its backward shows it.

    Args:
        roots: Where the backward through each output begins.
        targets: Leaves that require gradients, by place.
        links: Nodes at which a graph ends, with those from which the backward goes on.
    """
    places = {get_gradient_edge(target).node: place for place, target in targets.items()}
    if not places:  # as in megatron-core's training: `main_grad` takes all
        return (frozenset(),) * len(roots)
    return tuple(frozenset() if root is None else _reached(_node(root), places, links) for root in roots)


def _node(root: Root) -> Node:
    return (root if isinstance(root, GradientEdge) else get_gradient_edge(root)).node


def _reached(start: Node, places: Mapping[Node, int], links: Mapping[Node, Node]) -> frozenset[int]:
    seen, waiting = {start}, [start]
    while waiting:
        node = waiting.pop()
        following = [*(after for after, _ in node.next_functions), links.get(node)]
        fresh = {after for after in following if after is not None} - seen
        seen |= fresh
        waiting += fresh
    return frozenset(places[node] for node in places.keys() & seen)
