"""What runs inside Bridge: options on providers and recipes, batches, train loops and what they call to capture."""
