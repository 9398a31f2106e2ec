"""What plans are made from."""

import random

from hypothesis import strategies as st

from bridge_cg_plugin.cli.planner.command import costs_of_packs
from bridge_cg_plugin.cli.planner.plan import RankLayout

COSTS = costs_of_packs(RankLayout())
documents = st.lists(st.integers(1, 500), min_size=1, max_size=80)
packs = st.lists(st.lists(st.integers(1, 700), min_size=1, max_size=40).map(tuple), min_size=1, max_size=30)


def write(path, text):
    path.write_text(text)
    return path


# Documents of a pack as packs have them in the field: the share that has at most so many. Lengths are drawn evenly.
KNOWN_COUNTS = ((0.5, 12), (0.9, 43), (0.96, 64), (0.99, 106), (1.0, 358))


def known_packs(tokens, count=2000, seed=0):
    """Return packs whose numbers of documents follow `KNOWN_COUNTS`, geometrically between its points."""
    rng, made = random.Random(seed), []
    for index in range(count):
        share = (index + 0.5) / count
        points = zip([(0.0, 1), *KNOWN_COUNTS], KNOWN_COUNTS, strict=False)
        (low, least), (high, most) = next(pair for pair in points if share <= pair[1][0])
        number = round(least * (most / least) ** ((share - low) / (high - low)))
        cuts = sorted(rng.sample(range(1, tokens), number - 1))
        made.append(tuple(b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True)))
    return made
