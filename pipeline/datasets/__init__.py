"""Data sets to shard: CIFAR from its home page, and generated ones."""
