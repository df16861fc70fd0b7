"""Every process that this program starts: one way to start it, end it and explain its death."""
