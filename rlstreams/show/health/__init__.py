"""A run's health from outside: its small topics, folded by a Faust app and served as JSON."""
