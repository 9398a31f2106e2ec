"""Device memory under graphs that leaves and comes back to the same addresses."""
