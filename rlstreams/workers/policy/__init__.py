"""Which policy versions there are, and what a worker holds of them."""
