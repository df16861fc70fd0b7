"""Views: pure queries of the folds, for screens and watches."""
