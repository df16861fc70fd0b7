"""The process of one tracker: `python -m rlstreams.show.track.process FD`, fed through a pipe.

Questions are `open`, `write` and `close`; each is answered by why it failed, or by "".
A pipe that ends is the end of who feeds it: what was written is finished then.
"""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from rlstreams.show.track.sinks import SINKS, Sink


def main(fd: int) -> None:
    """Answer until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link: Connection[Any, Any] = Connection(fd)
    sink: Sink | None = None
    is_closed = False
    with suppress(EOFError, OSError):  # who feeds it is gone
        while not is_closed:
            question, *given = link.recv()
            try:
                if sink is None:
                    name, settings, about = given
                    sink = SINKS[name](settings, about)
                elif question == "write":
                    sink.write(*given)
                else:
                    is_closed = True
                    sink.close()
            except Exception as err:  # noqa: BLE001 - who feeds it hears of it
                link.send(f"{type(err).__name__}: {err}")
            else:
                link.send("")
    if sink is not None and not is_closed:
        sink.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
