"""Second implementations, written from the papers: plain Python, float64, gradients by hand."""
