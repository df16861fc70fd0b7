"""Event-sourced, asynchronous RL post-training of language models over Apache Kafka."""
