"""Training runs in processes of their own."""
