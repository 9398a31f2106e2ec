"""The executor that tests capture with where they name none: either of the two that need no GPU."""

from bridge_cg_plugin.graphs.recordings.executor import ReferenceExecutor

from .pooled import PooledExecutor
from .tape import TapeExecutor

KINDS = {"reference": ReferenceExecutor, "tape": TapeExecutor, "pooled": PooledExecutor}
_kind = "reference"


def new_executor() -> ReferenceExecutor:
    """Return an executor of the kind that the running test is given."""
    return KINDS[_kind]()


def choose(kind: str) -> None:
    """Let `new_executor` return another kind."""
    global _kind
    _kind = kind
