"""From records of runs to what people read: summaries, findings, a cost model of many nodes, a page."""
