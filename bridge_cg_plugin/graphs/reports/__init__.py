"""What graphs did: statistics, the report, progress messages, ranges in profiles."""
