"""Tools that look into a run: one sample, dead letters, recordings, a step done again."""
