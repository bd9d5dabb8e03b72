"""The control plane on server 0: membership, orders, checkpoints and the end of a run."""
