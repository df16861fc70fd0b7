"""Recordings in use: made, played back, fed to one role alone, compared, and stepped through."""
