"""The last lines of `up`: how it went, proven from the log, and what to try next."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rlstreams.show.metrics.figures import of_cost
from rlstreams.show.report.collect import PAGE_FILE, collect, write
from rlstreams.streams.audit.auditor import ReplayedError, audit
from rlstreams.streams.audit.report import AuditReport
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.run.run_log import RunLog
from rlstreams.streams.views.evaluation import EvaluationState
from rlstreams.streams.views.feed import ViewState
from rlstreams.streams.views.learning import hindrance
from rlstreams.up.supervisor.fault_hook import EndedRun, RunOutcome
from rlstreams.up.supervisor.fleet import LOGS, Failure
from rlstreams.words.screen import over, redone_lines, visible
from rlstreams.words.spelling import spelling
from rlstreams.workers.config.hub import model_folder

NAME = "rlstreams"
_RESUMABLE = {
    RunOutcome.COMPLETE: "",
    RunOutcome.DRAINED: "; --resume goes on",
    RunOutcome.FAILED: "; nothing that was committed is lost, --resume goes on once that is cured",
}


def audited(bus: Bus) -> AuditReport | None:
    """Audit the run; None, with the reason printed, where a replay wrote the steps."""
    try:
        return audit(bus)
    except ReplayedError as err:
        show(f"not audited: {err}")
        return None


def summarize(ended: EndedRun, state: ViewState, log: RunLog) -> int:
    """Write the report and print the summary; 0 if the run did not fail and its audit, if there is
    one, is clean."""
    breaches = () if ended.audit is None or ended.audit.ok else (ended.audit.text(),)
    folder = Path(ended.options.config.folder)
    try:
        _report(ended, log, folder)
        report_line = [f"report: {folder / PAGE_FILE}"]
    except OSError as err:  # a full disk ends no summary
        report_line = [f"report: not written, {err}"]
    show(
        *failure_lines(ended.failure),
        *accuracy_lines(state.evaluation),
        *hindrance_lines(state),
        *(() if ended.audit is None else (ended.audit.line(ended.num_killed),)),
        *cost_lines(state),
        *redone_lines(state.run.redone),
        *breaches,
        f"run {ended.options.config.run.id}: {ended.outcome}{_RESUMABLE[ended.outcome]}",
        *report_line,
        f"logs:   {folder / LOGS}",
        *model_lines(ended.options.config.folder, ended.step),
        "try next:",
        *(f"  {command}" for command in next_commands(ended)),
    )
    if (figures := ended.options.figures) is not None:
        figures.end(ended.outcome, "\n".join([*failure_lines(ended.failure), *breaches]))
    return 1 if ended.outcome is RunOutcome.FAILED or breaches else 0


def _report(ended: EndedRun, log: RunLog, folder: Path) -> None:
    config = ended.options.config
    if not ended.is_claimed and (folder / PAGE_FILE).is_file():
        return  # of the start before, which got farther
    given = collect(
        log,
        config.run.id,
        spelling=spelling("", str(model_folder(config.model.path))),
        audited=ended.audit,
        kills=ended.kills,
        stopped="" if ended.failure is None else ended.failure.reason,
        command=f"{NAME} {ended.options.command}",
    )
    write(given, folder)


def accuracy_lines(evaluation: EvaluationState) -> Sequence[str]:
    """Held-out accuracy of the first and last version; empty without an evaluation."""
    first, last = evaluation.first, evaluation.last
    if first is None or last is None:
        return ()
    if first is last:
        return (
            f"held-out {evaluation.measure} {first.accuracy:.2f} (version {first.policy_version}), "
            f"{over(first)}",
        )
    each = last.num_samples // max(1, last.num_rows)
    best = f"; best of {each} from {first.best:.2f} to {last.best:.2f}" if each > 1 else ""
    return (
        f"held-out {evaluation.measure} from {first.accuracy:.2f} (version {first.policy_version}) "
        f"to {last.accuracy:.2f} (version {last.policy_version}), {over(first, last)}{best}",
    )


def hindrance_lines(state: ViewState) -> Sequence[str]:
    """The cause that kept the run from learning, in a line; empty: nothing is seen."""
    return tuple(visible(str(found)) for found in (hindrance(state),) if found)


def cost_lines(state: ViewState) -> Sequence[str]:
    """Cost of the run in time and tokens, in a line; empty before the first step."""
    if not state.run.steps:
        return ()
    return ("; ".join(f"{figure.value} {figure.name}" for figure in of_cost(state)),)


def failure_lines(failure: Failure | None) -> Sequence[str]:
    """Why the run stopped, with the worker's last lines; empty if it did not."""
    if failure is None:
        return ()
    return (
        f"the run stopped: {visible(failure.reason)}",
        *(f"  {failure.worker} | {visible(line)}" for line in failure.last_lines),
    )


def show(*lines: str) -> None:
    """Print at once, also into a pipe."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def next_commands(ended: EndedRun) -> Sequence[str]:
    """Commands that continue the run, show it, prove it, and say why it may have failed."""
    program, options = program_name(), ended.options
    config, command, resume = options.config, options.command, options.resume
    if ended.outcome is RunOutcome.COMPLETE:
        resume = f"{command} --resume --steps {max(config.trainer.steps, ended.step) * 2}"
    folder = shlex.quote(config.folder)
    commands = [resume, f"web {folder}", f"inspect {folder}", f"audit {folder}"]
    is_failed = ended.outcome is RunOutcome.FAILED
    if is_failed and command.partition(" ")[0] == "up":  # not the demo: no file for `doctor`
        commands.append(f"doctor{command.removeprefix('up')}")
    return [f"{program} {words}" for words in commands]


def model_lines(folder: str, step: int) -> Sequence[str]:
    """Command that exports the trained model; empty: no checkpoint has it, or it is exported."""
    if not step or not any(Path(folder, "checkpoints").glob("[0-9]*-[0-9]*")):
        return ()
    for name in ("export", f"export-{step}"):
        to = Path(folder, name)
        if not to.exists() or (to.is_dir() and not any(to.iterdir())):
            named = shlex.quote(folder), shlex.quote(f"{folder}/{name}")
            return (f"model:  {program_name()} export model {named[0]} --out {named[1]}",)
    return ()


def program_name() -> str:
    """Shell words that run us: the bare name if the shell finds us under it, else the path."""
    own = Path(sys.executable).with_name(NAME)
    if not own.exists():  # Python runs us from a folder
        return f"{shlex.quote(sys.executable)} -m rlstreams"
    found = shutil.which(NAME)
    if found is not None and os.path.samefile(found, own):
        return NAME
    near = os.path.relpath(own)
    return shlex.quote(str(own) if near.startswith(os.pardir) else near)
