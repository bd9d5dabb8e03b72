"""The messages of a run, one file per group of senders and addressees. Nothing is ever unpickled.

A message is a head of a fixed size for its kind, followed by its bodies: raw floats, a report or JSON. The class of a
kind has the fields of its head, and its docstring names the bodies.

Fields that several messages share: worker and server are the index of the sender or of the addressee; session grows
with every join of a worker and every start of a server; generation grows with every roll-back; clock is the number of a
worker's step; version is the number of updates that the parameters contain."""
