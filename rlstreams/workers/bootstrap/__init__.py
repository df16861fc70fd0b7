"""The only place that picks concrete parts: bus, engine, scorer, channel, verifier."""
