"""Which step broke a run, and which samples of it: from the log alone."""
