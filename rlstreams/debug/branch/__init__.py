"""A run that goes on from a step of another one."""
