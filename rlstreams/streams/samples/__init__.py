"""The life of a sample: the one fold of it, and what it keeps."""
