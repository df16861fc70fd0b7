"""Whether what the log says of trained samples agrees with itself."""
