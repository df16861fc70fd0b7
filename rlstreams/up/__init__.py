"""All roles of a run on this machine: supervisor and live view."""
