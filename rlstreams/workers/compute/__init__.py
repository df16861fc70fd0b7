"""A model on a mesh of ranks, of which one may be all: what learns, and what scores."""
