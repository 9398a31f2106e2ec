"""A training run that is recorded, as `bridge-cg compare` starts it for every mode."""

import os
from dataclasses import replace
from typing import Any

from bridge_cg_plugin.cli.runs.recipe import Prepared

KINDS = ("eager", "upstream", "plugin")


def leave_nothing(config: Any) -> None:
    """Keep a configuration from resuming another run, and from writing checkpoints and event files."""
    config.checkpoint.load = config.checkpoint.save = config.checkpoint.save_interval = None
    config.logger.tensorboard_dir = None


def with_upstreams_graphs(run: Prepared) -> Prepared:
    """Switch the plugin off and return the run with upstream's own functions.

    Communication does not overlap then: capture of upstream's graphs aborts under `overlap_param_gather`.
    """
    import bridge_cg_plugin
    from bridge_cg_plugin.upstream.hooks.loops.steps import forward_step

    bridge_cg_plugin.deactivate()
    overlap = getattr(run.config, "comm_overlap", None)
    for section in (run.config.ddp, overlap, getattr(overlap, "user_comm_overlap_cfg", None)):
        if section is not None:
            section.overlap_param_gather = section.overlap_grad_reduce = False
    return replace(run, forward_step=forward_step(run.step, run.mode))


def is_first() -> bool:
    """Whether this process is rank 0; torchrun says which it is."""
    return os.environ.get("RANK", "0") == "0"
