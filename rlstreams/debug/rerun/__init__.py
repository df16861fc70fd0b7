"""One step of a run, executed again from its log."""
