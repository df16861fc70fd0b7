"""The loop that all roles share: poll, hand over, commit; and what keeps it honest."""
