"""The modules that use Spark: the session, a dataset as tasks, shipping the package, progress."""
