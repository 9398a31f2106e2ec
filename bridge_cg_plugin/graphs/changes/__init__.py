"""What a recording was made from, and how the engine notices that it changed."""
