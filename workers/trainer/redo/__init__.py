"""Doing committed steps again: ledger, restore, redo, retention."""
