"""Where the plugin touches upstream: seams as data, their states, patches, features."""
