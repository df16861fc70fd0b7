"""The life of a sample: its one fold, and the facts that the fold keeps."""
