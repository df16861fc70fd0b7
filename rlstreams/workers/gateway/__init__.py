"""The gateway: an agent's model calls over HTTP, each of them committed before it is answered."""
