"""Policy versions that were announced, and pulls of them by a worker."""
