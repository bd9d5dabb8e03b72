"""The bodies of messages as bytes."""
