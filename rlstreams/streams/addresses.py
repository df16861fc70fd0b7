"""Addresses of processes, and who reaches them."""

from __future__ import annotations

from urllib.parse import urlsplit


def is_loopback(address: str) -> bool:
    """Whether an address, or that of a url, means another place on each host."""
    host = (urlsplit(address).hostname or "") if "//" in address else address
    return host == "::1" or host.partition(".")[0] in ("localhost", "127")
