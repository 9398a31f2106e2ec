"""Options on providers, configurations, recipes and command lines."""
