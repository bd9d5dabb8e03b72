"""Files on a local disk, HDFS and the web behind one interface, for drivers, tasks and the trainer. No Spark."""
