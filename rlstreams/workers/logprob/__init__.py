"""Role `logprob`: trajectories to scored trajectories."""
