"""Agents: programs of somebody else that work on a task by calling the model over HTTP."""
