"""The worker's side of each exchange: what a worker does with a gradient, and where its next parameters come from."""
