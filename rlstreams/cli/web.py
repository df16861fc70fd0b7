"""`rlstreams web RUN...`: the live page of one run or several."""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from rlstreams.cli.named import opened, several
from rlstreams.cli.options import LOG, PORT, command, option


@command(
    "web",
    "rlstreams web runs/demo",
    "rlstreams web runs/demo runs/demo-seed1 --port 9410",
    "rlstreams web recordings/demo",
    takes=LOG,
)
@option(
    "--host",
    metavar="ADDRESS",
    help="to listen on; others than this machine can read everything",
    default="127.0.0.1",
    show_default=True,
)
@option("--port", type=PORT, help="to listen on; 0: a free one", default=9402, show_default=True)
def run(args: Namespace) -> int:
    """a live page of runs in the browser: charts, samples, steps, dead letters, flow

    Reads the log of each run, live, finished or recorded, and writes nothing. Several folders
    are compared in the same charts. The page needs no network, and answers this machine alone
    unless --host says otherwise. Until Ctrl-C.
    """
    from rlstreams.show.web.app import server_of
    from rlstreams.show.web.beside import listening
    from rlstreams.show.web.reading import RunReader

    with ExitStack() as stack:
        at = stack.enter_context(listening(args.host, args.port))
        readers: dict[str, RunReader] = {}
        for names in several(args.config.names):
            print(f"opening {' '.join(names)}", file=sys.stderr, flush=True)
            name = _name(names, readers)
            open_again = partial(opened, names, args.config.overrides, lambda _: None)
            reader = RunReader(name, shlex.join(names), open_again)
            stack.callback(reader.close)
            readers[name] = reader
        host = f"[{args.host}]" if ":" in args.host else args.host
        print(f"page: http://{host}:{at.getsockname()[1]}/", file=sys.stderr, flush=True)
        server_of(readers, args.host).run(sockets=[at])
    return 0


def _name(names: Sequence[str], taken: Collection[str]) -> str:
    """Return a run's name in addresses: its folder's or first file's, with a number if taken."""
    name = Path(names[0]).resolve().name
    return name if name not in taken else f"{name}-{len(taken) + 1}"
