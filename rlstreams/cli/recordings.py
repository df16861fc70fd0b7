"""`rlstreams recordings [DIR...]`: what is recorded here, and whether it is whole."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rlstreams.cli.arguments import examples

if TYPE_CHECKING:
    from rlstreams.streams.recording import Recording


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "recordings",
        help="list recordings, and verify them",
        description="Exit status 1 if something is missing or was changed, or nothing is there.",
        epilog=examples(
            "rlstreams recordings",
            "rlstreams recordings --verify recordings/demo",
        ),
    )
    parser.add_argument(
        "folders", nargs="*", metavar="DIR", help="recordings, or folders of them (recordings)"
    )
    parser.add_argument("--verify", action="store_true", help="read every byte of each")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """List; 1 if something is missing or was changed, or nothing is recorded there."""
    from rlstreams.streams.recording import Recording, RecordingError
    from rlstreams.streams.recording.verify import verify
    from rlstreams.streams.run.places import check_place

    for name in args.folders:
        if not Path(name).is_dir():
            check_place(name)
    found = [folder for name in args.folders or ["recordings"] for folder in _folders(Path(name))]
    if not found:
        where = ", ".join(args.folders or ["recordings"])
        told = f"no recording in {where}; make one: rlstreams record RUN"
        print(told, file=sys.stderr if args.json else sys.stdout)
        return 1
    num_bad = 0
    if not args.json:
        print(f"{'recording':<28} {'run':<14} {'state':<9} {'records':>9}  steps   time (UTC)")
    for folder in found:
        try:
            with Recording(folder) as recording:
                row, problems = _row(recording), list(recording.problems)
            if args.verify:
                problems = list(verify(folder).problems)
        except RecordingError as err:
            row, problems = {"recording": str(folder)}, [str(err)]
        num_bad += bool(problems)
        if args.json:
            verified = {"verified": True} if args.verify else {}
            print(json.dumps({**row, **verified, "problems": problems}))
            continue
        print(_line(row) + ("  every byte verified" if args.verify and not problems else ""))
        for problem in problems:
            print(f"  {problem}")
    return 1 if num_bad else 0


def _folders(folder: Path) -> list[Path]:
    """The recordings in a folder, or itself if it is one; also those whose manifest is gone."""
    from rlstreams.streams.run.recorded_log import is_recording

    if is_recording(folder) or any(folder.glob("*/*.avro")):
        return [folder]
    marked = {path.parent for path in folder.glob("*/index.sqlite")}
    marked |= {path.parent for path in folder.glob("*/manifest.json") if is_recording(path.parent)}
    return sorted(marked)


def _row(recording: Recording) -> dict[str, object]:
    manifest = recording.manifest
    span = recording.index.time_span()
    steps = [
        entry.facts.step or 0
        for order in ("ASC", "DESC")
        for entry in recording.index.entries(
            f"f.event = 'StepCompleted' AND r.step IS NOT NULL ORDER BY r.step {order} LIMIT 1"
        )
    ]
    return {
        "recording": str(recording.folder),
        "run": manifest.run,
        "state": manifest.state,
        "records": recording.num_records,
        "steps": steps or None,
        "first_ms": span[0] if span else None,
        "last_ms": span[1] if span else None,
        "selection": manifest.selection,
    }


def _line(row: dict[str, object]) -> str:
    if "run" not in row:
        return f"{row['recording']}"
    steps = row["steps"]
    of = f"{steps[0]}-{steps[-1]}" if isinstance(steps, list) else "none"
    selection = row["selection"]
    picked = f"  only {selection}" if selection else ""
    return (
        f"{row['recording']:<28} {row['run']:<14} {row['state']:<9} {row['records']:>9,}  "
        f"{of:<7} {_time(row['first_ms'])} to {_time(row['last_ms'])[11:]}{picked}"
    )


def _time(ms: object) -> str:
    from rlstreams.streams.log.utc import utc_text

    return utc_text(ms) if isinstance(ms, int) else "-"
