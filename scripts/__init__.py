"""Programs around the plugin."""
