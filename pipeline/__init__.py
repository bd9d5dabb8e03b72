"""Shard image data over workers so that every worker sees the whole world."""

__version__ = "0.1.0"
