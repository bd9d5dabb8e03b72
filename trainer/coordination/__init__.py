"""The order of events of a run as pure decisions: no sockets, no clock of its own."""
