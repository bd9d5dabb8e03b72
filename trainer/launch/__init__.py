"""The processes of one host: their start and their supervision."""
