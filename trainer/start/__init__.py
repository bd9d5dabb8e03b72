"""The start of a run: what it begins or continues, its folder, and its processes on this host or on a cluster."""
