"""Where every issued sample is, found from the topics alone."""
