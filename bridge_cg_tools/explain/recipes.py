"""What a plan of packed documents takes from a recipe."""

import warnings

from bridge_cg_plugin.options.layout import RankLayout

from .command import built, without_imports


def shared_packs(name: str) -> tuple[RankLayout, int | None]:
    """Return how a recipe's ranks share packs, and the tokens of a pack; None where they are not packed offline.

    Raises:
        OptionError: There is no such recipe, or it cannot be built.
    """
    asked = without_imports()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = built(name, asked is not None)
    model = config.model
    layout = RankLayout(
        tensor=model.tensor_model_parallel_size,
        context=model.context_parallel_size,
        sequence=bool(model.sequence_parallel),
    )
    specs = getattr(getattr(config, "dataset", None), "offline_packing_specs", None)
    return layout, getattr(specs, "packed_sequence_size", None)
