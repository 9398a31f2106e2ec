"""Pages and plots that are written from records."""
