"""Rows that go on arriving: each batch of a stream is put into buckets and committed as a generation of one shard set."""
