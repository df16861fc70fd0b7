"""Servers to hold the adapters against: one that behaves, and can be told to misbehave."""
