"""Tests with processes of a training run, or in virtual time."""
