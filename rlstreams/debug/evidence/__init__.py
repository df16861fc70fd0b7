"""Checks of the log's facts about trained samples against each other."""
