"""From scored trajectories to the groups of a step."""
