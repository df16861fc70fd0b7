"""Role `rollout`: prompts to trajectories."""
