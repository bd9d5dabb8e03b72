"""Spark MLlib compared with the parameter server: chapter 2 of the thesis, repeated on one machine.

experiment: the compared systems and models, and their flags. configurations: the settings of every run. problems: the
data sets, generated or read. rows, arithmetic: losses and optima in numpy. systems/: one file per system. preparation,
run, records: store the data, run every configuration on every system, record every run. results/: summaries, findings,
a cost model for many nodes, the report. command: the command line."""
