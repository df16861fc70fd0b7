"""The link that weights travel on."""
