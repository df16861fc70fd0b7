"""The log on Apache Kafka; only this package imports its clients."""
