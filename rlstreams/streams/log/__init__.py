"""The log: topics, records, positions and the port of the bus. No Kafka client, no reader."""
