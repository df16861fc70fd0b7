"""The life of an agent's session: its one fold, and the sample that it becomes."""
