"""Streaming input: every batch is hashed into buckets and committed as one generation of a growing shard set."""
