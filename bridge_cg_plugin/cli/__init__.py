"""The command `bridge-cg`: the plugin at work never imports it."""
