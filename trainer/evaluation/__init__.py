"""The evaluator: its process, and the recalibration of BatchNorm statistics."""
