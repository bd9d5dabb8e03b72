"""MLlib against the parameter server, the way chapter 2 of the thesis compares them (SPEC 9).

problems: what is learned, generated or read; rows, arithmetic: the same in numpy; cells: which comparisons, and what a
run reports; mllib, server, averaging (and meeting): the arms; timing: how busy the cores were; run: all of it, in order;
environment: where it ran; summary: medians, ratios, goals; scaling, forecast: a model of 140 nodes, fitted and tested;
published: the thesis's numbers; report, command: for people."""
