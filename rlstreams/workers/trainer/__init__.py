"""Role `trainer`: scored trajectories to steps and policy versions."""
