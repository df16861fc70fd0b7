"""A trajectory and its lineage for people: on the terminal, as one HTML page, as JSON lines."""
