"""The embedded Apache Kafka: one node on loopback, its jars and its Java."""
