"""Which buckets are worth recording, from what microbatches looked like, and recording them between steps."""
