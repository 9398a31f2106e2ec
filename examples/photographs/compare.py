"""The comparison of runs with eager ones, which the plugin's report makes too."""

from bridge_cg_plugin.report.spread import FACTOR, Spread, compare_to_spread

__all__ = ["FACTOR", "Spread", "compare_to_spread"]
