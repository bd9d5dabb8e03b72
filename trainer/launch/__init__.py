"""The processes of one host: how they start, how they are watched, and how a run ends."""
