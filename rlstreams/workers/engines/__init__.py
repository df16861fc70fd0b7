"""Engines, which sample tokens, and the port of scorers, which score them."""
