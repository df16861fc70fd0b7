"""What comes before a run, or tries one: a project, a trial of rows, the doctor, chaos."""
