"""The log in one process, for tests; it gives the same guarantees as the one on Kafka."""
