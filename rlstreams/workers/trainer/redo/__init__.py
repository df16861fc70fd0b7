"""Redo of committed steps, and the retention of their records."""
