"""Statistics of a ledger's records."""
