"""Execution of a plan's runs, and the ledger that keeps their records."""
