"""What a vision encoder needs to run as a graph: layout on the device, buckets, programs, the Bridge-facing helper."""
