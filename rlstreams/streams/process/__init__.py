"""Every process that this program starts: one way to start it, to end it, to say why it died."""
