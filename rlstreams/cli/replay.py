"""`rlstreams replay RECORDING`: a recording into a fresh run, or into one role alone."""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rlstreams.cli.arguments import examples
from rlstreams.cli.ranges import add_selection
from rlstreams.cli.replay_options import fresh_target, record_filter

if TYPE_CHECKING:
    from rlstreams.debug.replay.player import Played
    from rlstreams.debug.replay.target import Target
    from rlstreams.streams.recording import Recording
    from rlstreams.streams.recording.selection import Selection

INTO = ("trainer", "logprob", "rollout")


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "replay",
        help="play a recording into a fresh run, or into one role alone",
        description="Records keep their bytes, keys and partitions; the header rlstreams-replay-of "
        "names their recorded offset. Refuses to replay into a run that has records. Exit status "
        "1 if the recording lacks records, or with --into if anything differs.",
        epilog=examples(
            "rlstreams replay recordings/demo --as slow --speed 2 --from step:5",
            "rlstreams replay recordings/demo --into trainer",
            "rlstreams replay recordings/demo --dry-run --rewards 1:",
        ),
    )
    parser.add_argument("recording", metavar="RECORDING", help="its folder")
    parser.add_argument(
        "--as",
        dest="run_id",
        default="",
        metavar="RUN_ID",
        help="id of the fresh run (default: the recorded id plus -replay)",
    )
    parser.add_argument("--dir", default="", metavar="DIR", help="its folder (runs/RUN_ID)")
    parser.add_argument(
        "--bootstrap", default="", metavar="HOST:PORT", help="a broker; default: an embedded one"
    )
    parser.add_argument("--keep", action="store_true", help="leave the embedded broker running")
    role = parser.add_argument_group("one role alone")
    role.add_argument("--into", choices=INTO, help="run this role, and compare what it writes")
    role.add_argument(
        "--weights",
        action="append",
        default=[],
        metavar="DIR",
        help="folder of weight versions or checkpoints, in addition to the recording's",
    )
    role.add_argument(
        "--keep-weights", action="store_true", help="trainer: keep every version that it makes"
    )
    play = parser.add_argument_group("playback")
    play.add_argument("--speed", default="max", metavar="X", help="1 as recorded, 10, ... (max)")
    play.add_argument("--from", dest="begin", default="", metavar="WHEN", help="seek: step:7, "
                      "version:5, +30 (seconds), or an ISO time")  # fmt: skip
    play.add_argument("--to", dest="end", default="", metavar="WHEN", help="the same; stop there")
    play.add_argument("--paused", action="store_true", help="start paused")
    play.add_argument(
        "--ordered", action="store_true", help="keep the recorded order across partitions too"
    )
    play.add_argument("--dry-run", action="store_true", help="only count what would be played")
    add_selection(parser)
    more = parser.add_argument_group("which samples (all conditions must hold)")
    more.add_argument("--rewards", default="", metavar="A:B", help="from A to B, both included")
    more.add_argument("--staleness", default="", metavar="A:B", help="of trained samples")
    more.add_argument("--dead-letters", choices=("only", "without"), default="",
                      help="only dead-lettered samples, or none of them")  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Play; 0 if everything asked for was played and nothing of the recording is missing, and with
    --into only if nothing differs.
    """
    from rlstreams.debug.replay.filters import resolve
    from rlstreams.streams.recording import Recording
    from rlstreams.streams.run.places import RECORDINGS, check_checkpoints, check_place

    check_place(args.recording, [RECORDINGS])
    for name in args.weights:
        check_checkpoints(name, "--weights", or_weights=True)
    with Recording(args.recording) as recording:
        for problem in recording.problems:
            print(f"warning: {problem}", file=sys.stderr)
        if args.into:
            from rlstreams.cli.replay_into import run_into

            return run_into(args, recording)
        selection = resolve(recording, record_filter(args))
        if args.dry_run:
            _count(recording, selection)
        else:
            with fresh_target(args, recording) as target:
                played = _play(args, recording, target, selection)
                _tell(played, target)
        if recording.problems:
            print("records are missing in the recording: see the warnings above", file=sys.stderr)
            return 1
    return 0


def speed_of(text: str) -> float:
    """Recorded seconds per second.

    Raises:
        ConfigError: not above 0.
    """
    from rlstreams.streams.log.errors import ConfigError

    try:
        speed = math.inf if text == "max" else float(text.removesuffix("x"))
    except ValueError:
        speed = 0.0
    if not speed > 0:
        raise ConfigError(f"--speed must be a number above 0, or max, got {text!r}")
    return speed


def _count(recording: Recording, selection: Selection) -> None:
    from collections import Counter

    from rlstreams.debug.replay.filters import chosen
    from rlstreams.streams.log.counted import counted

    counts = Counter(raw.position.topic for raw in chosen(recording, selection))
    for topic, count in sorted(counts.items()):
        print(f"{topic:<20} {count:>10,}")
    print(f"{counted(counts.total(), 'record')} would be played")


def _play(
    args: argparse.Namespace, recording: Recording, target: Target, selection: Selection
) -> Played:
    from rlstreams.debug.replay.filters import chosen
    from rlstreams.debug.replay.keys import HELP, Keys
    from rlstreams.debug.replay.player import Pace, Player
    from rlstreams.debug.replay.progress import Bar
    from rlstreams.debug.replay.seek import Seeker
    from rlstreams.schemas.events import StepCompleted
    from rlstreams.up.supervisor.terminal import Keyboard

    pace = Pace(speed=speed_of(args.speed), is_paused=args.paused)
    seeker = Seeker(recording, selection)
    with Keyboard() as keyboard, Bar(recording, pace) as bar:
        if sys.stdin.isatty():
            print(HELP, file=sys.stderr)
        keys = Keys(pace, seeker, lambda: player.played.at_ms)

        def look() -> None:
            for key in keyboard.pressed():
                keys.press(key)

        def pause(seconds: float) -> None:
            look()
            bar.show(said=keys.said)
            time.sleep(seconds)

        def progress(played: Played) -> None:
            look()
            bar.show(played, said=keys.said)

        player = Player(
            target.bus,
            recording.manifest.run,
            pace,
            is_part=_is_part(recording, selection),
            in_order=args.ordered,
            seek=seeker.records,
            is_step=lambda raw: isinstance(recording.event(raw), StepCompleted),
            on_progress=progress,
            sleep=pause,
        )
        return player.play(chosen(recording, selection))


def _is_part(recording: Recording, selection: Selection) -> bool:
    """Whether less is played than the run's log held: an audit judges what can hold then."""
    from rlstreams.streams.recording.selection import Selection as Everything

    is_chosen = selection != Everything() or bool(recording.manifest.selection)
    return is_chosen or bool(recording.problems)


def _tell(played: Played, target: Target) -> None:
    from rlstreams.streams.log.counted import counted

    for topic, count in sorted(played.by_topic.items()):
        print(f"{topic:<20} {count:>10,}")
    rate = played.num_records / max(played.seconds, 1e-9)
    print(
        f"{counted(played.num_records, 'record')}, {played.num_bytes / 1e6:,.1f} MB in "
        f"{played.seconds:.1f} s ({rate:,.0f} a second) into run {target.config.run.id}, "
        f"folder {Path(target.config.folder)}"
    )
