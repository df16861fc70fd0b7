"""Report of a run: one self-contained HTML page, and the learning curve as PNG."""
