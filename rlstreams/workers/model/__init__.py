"""Hugging Face models: load, mask, score, route, tokenize."""
