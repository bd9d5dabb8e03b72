"""The compared systems, one file each. Each runs a configuration and returns a measurement."""
