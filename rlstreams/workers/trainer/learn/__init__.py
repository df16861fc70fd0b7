"""One optimizer step: packing, loss, gradients, update. Knows no topic."""
