"""Tools before a run: a project, a trial of rows, the doctor, chaos."""
