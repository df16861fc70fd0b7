"""Doctor: what is wrong with this machine, configuration or broker, and what to do about it."""
