"""A project of one's own: what `rlstreams init` writes."""
