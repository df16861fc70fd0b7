"""A real model server that does wrong on demand, and what the guard says of it."""
