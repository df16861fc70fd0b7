"""The log on Apache Kafka; here alone are its clients imported."""
