"""Shards in memory, and the stream of mini-batches that is drawn from them."""
