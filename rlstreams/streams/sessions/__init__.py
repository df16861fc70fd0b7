"""The life of an agent's session: the one fold of it, and the sample that it becomes."""
