"""Problems to learn from and to be judged on: where rows come from, and which are which."""
