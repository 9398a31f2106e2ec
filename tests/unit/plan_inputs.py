"""What plans are made from."""

from hypothesis import strategies as st

from bridge_cg_plugin.cli.planner.command import costs_of_packs
from bridge_cg_plugin.cli.planner.plan import RankLayout

COSTS = costs_of_packs(RankLayout())
documents = st.lists(st.integers(1, 500), min_size=1, max_size=80)
packs = st.lists(st.lists(st.integers(1, 700), min_size=1, max_size=40).map(tuple), min_size=1, max_size=30)


def write(path, text):
    path.write_text(text)
    return path
