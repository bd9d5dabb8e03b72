"""Where Spark is met: the session, a dataset as tasks, shipping the package, progress."""
