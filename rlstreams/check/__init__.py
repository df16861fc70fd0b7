"""Before a run: a project is written, its rows are tried, the doctor looks."""
