"""The systems that are compared, one file each: all take a configuration and return a measurement."""
