"""Problems to learn from and to be judged on: sources of rows, and their splits."""
