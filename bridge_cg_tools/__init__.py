"""Tools beside the plugin, which never imports them: the command bridge-cg, reports, planning, launcher, benchmarks."""
