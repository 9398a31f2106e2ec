"""Images that move between data-parallel ranks, so that their encoders have as much to do."""
