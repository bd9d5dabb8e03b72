"""The steps of which sharding, resharding and materializing are made; each takes its inputs and returns its result."""
