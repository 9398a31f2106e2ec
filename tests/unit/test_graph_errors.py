"""The engine's errors."""

from bridge_cg_plugin.graphs.errors import release_frames


def raised(error):
    """Return an error whose frame holds a list, and that list."""
    held = [object()]
    try:
        raise error
    except type(error) as caught:
        return caught, held


def held_by(error):
    return error.__traceback__.tb_frame.f_locals.get("held")


def test_errors_that_are_each_others_cause_are_released_once():
    (first, _), (second, _) = raised(ValueError()), raised(KeyError())
    first.__cause__, second.__cause__ = second, first
    assert held_by(first) and held_by(second)
    release_frames(first)
    assert held_by(first) is held_by(second) is None
