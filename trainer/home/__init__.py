"""Where a run is kept: its home, a folder wherever the storage layer reaches, and each host's own work folder. No torch, no
sockets."""
