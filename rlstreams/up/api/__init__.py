"""The Python API: a run from a script or a notebook."""
