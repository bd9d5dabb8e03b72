"""What the files of jobs/ call: requests, flags, sharding, resharding, comparing."""
