"""Opening the log of a run: live, finished or recorded."""
