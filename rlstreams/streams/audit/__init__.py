"""Audit: where every issued sample is, found from the topics alone."""
