"""Transport of events: topics, records, the bus and its interfaces. No torch, no role names."""
