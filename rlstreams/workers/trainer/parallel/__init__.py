"""Training and scoring over several processes of one host, each with a shard (FSDP2)."""
