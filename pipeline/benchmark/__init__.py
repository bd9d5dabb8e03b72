"""MLlib against the parameter server, the way chapter 2 of the thesis compares them (SPEC 9).

problems: what is learned, generated or read; cells: which comparisons; mllib, averaging, server: the arms; timing: what
they report; scaling: a model of 140 nodes; published: the thesis's numbers; run: all of it, in order; report: to look at."""
