"""What is wrong with this machine, this configuration or this broker, and what to do about it."""
