"""The evaluator: its process, and BatchNorm statistics taken anew."""
