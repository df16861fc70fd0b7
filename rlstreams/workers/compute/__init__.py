"""A model on a mesh of ranks (one rank included): the learner and the scorer."""
