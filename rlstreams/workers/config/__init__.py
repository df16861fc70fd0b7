"""The configuration of a run: its fields, their layers, their documentation."""
