"""A run through windows of time: its small topics, folded by a Faust app and served as JSON."""
