"""What the plugin warns of reaches the log of a run that Bridge has set up."""

import logging

import pytest
from megatron.bridge.training.utils.log_utils import setup_logging

from bridge_cg_plugin.announce import warn


@pytest.fixture
def bridges_logging():
    """Bridge's logging with its defaults, which drop what any logger reports as a warning."""
    loggers = [logging.getLogger(), *(logging.getLogger(name) for name in logging.root.manager.loggerDict)]
    before = [(logger, list(logger.filters), logger.level) for logger in loggers]
    setup_logging()
    yield
    for logger, filters, level in before:
        logger.filters[:] = filters
        logger.setLevel(level)


def test_bridge_does_not_drop_warnings_of_the_plugin(bridges_logging, caplog):
    logging.getLogger("bridge_cg_plugin").warning("dropped")
    warn("the encoder runs eager")
    assert [record.getMessage() for record in caplog.records] == ["[rank 0] the encoder runs eager"]
