"""The entry points of the files in jobs/: requests, flags, sharding, resharding, comparing."""
