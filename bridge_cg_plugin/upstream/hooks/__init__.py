"""What runs inside Bridge: providers, configurations, the train loop, launchers."""
