"""The gateway's HTTP: a server, and one dialect for each kind of client."""
