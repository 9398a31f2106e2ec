"""Writes to a watched dict are told, on every Python."""

import pytest
from torch import nn

from bridge_cg_plugin.graphs.changes import dict_watch


class Told:
    def __init__(self):
        self.writes = []

    def note(self, table, key, value):
        self.writes.append((key, value))


@pytest.mark.parametrize("in_objects", [None, True], ids=["as here", "values in objects"])
def test_an_attribute_that_is_written_is_told_and_watching_changes_nothing(monkeypatch, in_objects):
    """Since Python 3.13 writes to an object may pass its dict by."""
    if in_objects is not None:
        monkeypatch.setattr(dict_watch, "_VALUES_IN_OBJECTS", in_objects)
    told, module = Told(), nn.Linear(2, 2)
    table, before = vars(module), list(vars(module).items())
    dict_watch.WATCHER.watch(table, told.note)
    dict_watch.WATCHER.watch(table, told.note)
    assert vars(module) is table and list(table.items()) == before
    module.scale = 0.0
    module.scale = -0.0
    del module.scale
    assert [key for key, _ in told.writes] == ["scale"] * 3
    assert [value for _, value in told.writes[:2]] == [0.0, -0.0]
    dict_watch.WATCHER.unwatch(table, told.note)
