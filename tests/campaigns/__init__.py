"""Random faults in bulk: `python -m tests.campaigns.NAME --help`."""
