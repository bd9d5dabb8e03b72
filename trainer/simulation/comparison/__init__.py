"""A comparison of exchanges and protocols on one virtual cluster."""
