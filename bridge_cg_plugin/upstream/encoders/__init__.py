"""Vision encoders as upstream builds them, and what their graphs need of upstream."""
