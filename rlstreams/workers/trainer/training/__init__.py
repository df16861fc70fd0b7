"""Training from samples to checkpoints, on one rank or several."""
