"""The commands that train: `train` and `compare`."""
