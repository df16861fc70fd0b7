"""What a run leaves for people: one self-contained HTML page, and the learning curve as PNG."""
