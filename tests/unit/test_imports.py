"""What importing Bridge in a command line spares, and what it shows."""

import logging
import warnings

from bridge_cg_plugin.announce import LOGGER, warn
from bridge_cg_plugin.cli.runs.recipe import quiet
from bridge_cg_plugin.options import GraphOptionWarning


def test_other_libraries_are_quiet_and_the_plugin_is_not(caplog):
    with warnings.catch_warnings(record=True) as shown, quiet():
        warnings.warn("Apex is not installed", stacklevel=1)
        warnings.warn("pynvml is deprecated", FutureWarning, stacklevel=1)
        warnings.warn("write another field", GraphOptionWarning, stacklevel=1)
        logging.getLogger("other").warning("No CUDA runtime is found")
        warn("a seam does not fit")
    assert [record.message for record in caplog.records] == ["[rank 0] a seam does not fit"]
    logging.getLogger("other").warning("afterwards")
    assert caplog.messages[-1] == "afterwards" and LOGGER.isEnabledFor(logging.WARNING)
    assert [str(one.message) for one in shown] == ["write another field"]
