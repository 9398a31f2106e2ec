"""What the commands of scripts/performance call: models, measurements, runs, records and pages."""
