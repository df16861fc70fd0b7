"""Report of a run: one self-contained HTML page, and its steps as CSV."""
