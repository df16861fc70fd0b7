"""What samples and scores."""
