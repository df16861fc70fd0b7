"""The name of the network interface that has an address."""

from __future__ import annotations

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915  # linux/sockios.h


def name_of(host: str) -> str:
    """`lo` for 127.0.0.1.

    Raises:
        ValueError: no interface has it, or it is no IPv4 address.
    """
    try:
        wanted = socket.inet_aton(socket.gethostbyname(host))
    except OSError as err:
        raise ValueError(f"{host} is no IPv4 address, nor the name of one: {err}") from err
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it has no IPv4 address
                continue
            if answer[20:24] == wanted:
                return name
    raise ValueError(f"no network interface has the address {host}")
