"""Audit: the state of every issued sample, found from the topics alone."""
