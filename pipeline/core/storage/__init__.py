"""Files on a local disk, HDFS, object stores and the web behind one interface, for drivers, tasks and the trainer."""
