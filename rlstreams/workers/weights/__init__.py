"""Channels and servers that carry weights from the trainer to engines."""
