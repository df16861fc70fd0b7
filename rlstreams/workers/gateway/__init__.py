"""The gateway: an agent's model calls over HTTP, each of them in the log before it is answered."""
