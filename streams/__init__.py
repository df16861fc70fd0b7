"""How events travel: topics, records, the bus and its ports. No torch, no role names."""
