"""The log in one process, for tests; it keeps the promises of the one on Kafka."""
