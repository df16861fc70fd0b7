"""User code in child processes: verifiers and environments alike."""
