"""Weights as a log: anchors, and the lossless deltas between them."""
