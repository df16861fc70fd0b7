"""Agents: programs of users that work on a task by calling the model over HTTP."""
