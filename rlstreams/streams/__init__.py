"""Transport of events: topics, records, the bus and its interfaces. No torch, no role names."""

if __name__ != "rlstreams.streams":  # a module under two names would have two of every class
    raise ImportError(f"import rlstreams.streams, not {__name__}")
