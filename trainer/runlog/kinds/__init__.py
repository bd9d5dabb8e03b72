"""The kinds of events in metrics.jsonl: ``log_event`` writes one, and ``event_from_json`` reads one."""
