"""Shards in memory, and the stream of mini-batches drawn from them."""
