"""A TCP proxy that can hurt: it delays, throttles, cuts, half-closes, and swallows.

One thread moves the bytes of all connections. Faults are set from the test's thread and hold for
living and new connections alike until they are changed. With a `trigger` on the requests it cuts at
one exact place of the conversation.
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

CHUNK = 65_536  # bytes of one read
TICK_S = 0.01
HOST = "127.0.0.1"
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER on, for no time

Trigger = Callable[[bytes], bool]  # of the next bytes to the server: cut here


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """What happens to bytes now."""

    delay_s: float = 0.0
    """Each chunk is handed on this much later, in both directions."""
    bytes_per_s: float = 0.0
    """Of each direction of each connection; 0: no limit."""
    swallow: bool = False
    """Take connections and bytes, and hand nothing on: no reset, no end, no answer."""
    refuse: bool = False
    """New connections are closed at once."""


CALM = Weather()


@dataclass(slots=True)
class _Way:
    """One direction of one connection."""

    source: socket.socket
    sink: socket.socket
    to_server: bool
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)  # not before, bytes
    next_s: float = 0.0  # throttled until
    ended: bool = False  # the source has nothing more to say
    shut: bool = False  # and the sink was told


class FaultProxy:
    """Listens on `port` and forwards to `upstream`; a context manager.

    Args:
        upstream_port: of the server, on loopback.
        port: to listen on; 0: a free one.
    """

    def __init__(self, upstream_port: int = 0, port: int = 0) -> None:
        self.upstream_port = upstream_port
        self._listener = socket.create_server((HOST, port))
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.num_cut = 0  # connections, by `cut` or a trigger
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._lock = threading.Lock()  # over everything below
        self._weather = CALM
        self._trigger: Trigger | None = None
        self._after = False
        self._ways: dict[socket.socket, _Way] = {}  # by source
        self._doomed: set[socket.socket] = set()  # cut as soon as their server answers
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """`host:port` for clients."""
        return f"{HOST}:{self.port}"

    def hurt(self, weather: Weather) -> None:
        """Do this to all bytes from now on, e.g. `hurt(Weather(delay_s=0.5))`."""
        with self._lock:
            self._weather = weather

    def calm(self) -> None:
        """No fault any more; connections that swallowed are cut, for bytes of theirs are gone."""
        with self._lock:
            if self._weather.swallow:
                self._cut_all()
            self._weather = CALM

    def cut(self) -> None:
        """Reset every connection now."""
        with self._lock:
            self._cut_all()

    def half_close(self) -> None:
        """End the way to the server on every connection; answers still come back."""
        with self._lock:
            for way in self._ways.values():
                way.ended = way.ended or way.to_server

    def cut_at(self, trigger: Trigger, *, after: bool) -> None:
        """Once, at the first bytes for the server of which `trigger` says so.

        Args:
            trigger: looks at each chunk.
            after: the server gets the chunk, and its answer is lost; else it never gets it.
        """
        with self._lock:
            self._trigger, self._after = trigger, after

    @property
    def is_armed(self) -> bool:
        """A trigger waits for its bytes."""
        with self._lock:
            return self._trigger is not None

    def close(self) -> None:
        """End the thread and every connection."""
        self._stop.set()
        self._thread.join(5.0)
        with self._lock:
            self._cut_all()
        self._listener.close()
        self._selector.close()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            events = self._selector.select(TICK_S)
            if self._weather.bytes_per_s:
                self._stop.wait(TICK_S)  # a throttled source is always ready
            with self._lock:
                for key, _ in events:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj in self._ways:
                        self._read(self._ways[key.fileobj])
                now_s = time.monotonic()
                for way in tuple(self._ways.values()):
                    self._write(way, now_s)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        if self._weather.refuse:
            client.close()
            return
        try:
            server = socket.create_connection((HOST, self.upstream_port), 1.0)
        except OSError:
            client.close()
            return
        for source, sink in ((client, server), (server, client)):
            source.setblocking(False)
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._ways[source] = _Way(source, sink, to_server=source is client)
            self._selector.register(source, selectors.EVENT_READ)

    def _read(self, way: _Way) -> None:
        if way.waiting and self._weather.bytes_per_s:
            return  # the sender feels the throttle too
        try:
            data = way.source.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            self._cut(way)
            return
        if not data:
            way.ended = True
            self._selector.unregister(way.source)
        elif self._weather.swallow or (way.ended and way.to_server):
            return
        elif way.to_server and self._trigger is not None and self._trigger(data):
            self._trigger = None
            if not self._after:
                self._cut(way)
                return
            self._doomed.add(way.sink)
            self._queue(way, data)
        elif way.source in self._doomed:
            self._cut(way)
        else:
            self._queue(way, data)

    def _queue(self, way: _Way, data: bytes) -> None:
        way.waiting.append((time.monotonic() + self._weather.delay_s, data))

    def _write(self, way: _Way, now_s: float) -> None:
        while way.waiting and way.waiting[0][0] <= now_s and way.next_s <= now_s:
            not_before, data = way.waiting.popleft()
            rate = self._weather.bytes_per_s
            share = data[: max(1, int(rate * TICK_S))] if rate else data
            try:
                sent = way.sink.send(share)
            except BlockingIOError:
                sent = 0
            except OSError:
                self._cut(way)
                return
            if sent < len(data):
                way.waiting.appendleft((not_before, data[sent:]))
            if rate:
                way.next_s = now_s + sent / rate
            if not sent:
                return
        if way.ended and not way.waiting and not way.shut:
            way.shut = True
            self._shut(way)

    def _shut(self, way: _Way) -> None:
        back = self._ways.get(way.sink)
        if back is None or back.shut:
            self._close(way)  # both ways have ended
            return
        try:
            way.sink.shutdown(socket.SHUT_WR)
        except OSError:
            self._cut(way)

    def _cut_all(self) -> None:
        while self._ways:
            self._cut(next(iter(self._ways.values())))

    def _cut(self, way: _Way) -> None:
        """Close both ends with a reset, which loses what was on its way."""
        self.num_cut += 1
        for end in (way.source, way.sink):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._close(way)

    def _close(self, way: _Way) -> None:
        for end in (way.source, way.sink):
            if self._ways.pop(end, None) is not None and end in self._selector.get_map():
                self._selector.unregister(end)
            self._doomed.discard(end)
            end.close()
