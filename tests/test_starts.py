"""Who starts a process: read from the syntax trees."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import Path

from tests.syntax_trees import MODULES, Module, is_within, modules_of

STARTS_PROCESSES = ("rlstreams.streams.process",)  # all others ask `Child`
# Every call that starts one. `subprocess.run` with a `timeout` is a question: it comes back with
# its answer, or ends what it asked, and nothing lives on.
STARTS = re.compile(
    r"subprocess\.(Popen|run|call|check_call|check_output|getoutput|getstatusoutput)"
    r"|os\.(fork|forkpty|system|popen|posix_spawnp?|spawn\w+)"
    r"|pty\.(fork|spawn)"
    r"|(.*\.)?(create_)?subprocess_(exec|shell)"
    r"|.*\.(Process|Pool|ProcessPoolExecutor)"
)
# Of these nothing is imported by its own name, under which a call would not be seen.
WHOLE = ("subprocess", "os", "pty", "multiprocessing", "concurrent.futures")


def process_starts(modules: Sequence[Module]) -> list[str]:
    """Product modules that start a process and may not."""
    product = [m for m in modules if is_within(m.name, "rlstreams")]
    found = []
    for module in product:
        if any(is_within(module.name, place) for place in STARTS_PROCESSES):
            continue
        for node in module.nodes:
            if isinstance(node, ast.Call) and STARTS.fullmatch(name := ast.unparse(node.func)):
                is_question = any(keyword.arg == "timeout" for keyword in node.keywords)
                found += (
                    []
                    if name == "subprocess.run" and is_question
                    else [f"{module.name} calls {name}"]
                )
        found += [
            f"{module.name} imports {name}"
            for name in module.imports
            if STARTS.fullmatch(name) and name.rpartition(".")[0].startswith(WHOLE)
        ]
    return found


def test_processes_are_started_in_one_place() -> None:
    """So each has an owner, an end for all that it starts, and a cause of death."""
    assert process_starts(MODULES) == []
    names = {module.name for module in MODULES}
    assert [place for place in STARTS_PROCESSES if place not in names] == []


def test_the_check_finds_what_is_wrong(tmp_path: Path) -> None:
    """And neither a question, nor what only has such a name."""
    bad = {
        "rlstreams/streams/process/child.py": "import subprocess\nsubprocess.Popen(['a'])\n",
        "rlstreams/show/starts.py": (
            "import os, subprocess\nfrom subprocess import Popen\nfrom a.b import Process\n"
            "subprocess.run(['a'], timeout=3)\nsubprocess.run(['a'])\nos.fork()\n"
            "context.Process(target=f)\nasyncio.create_subprocess_exec('a')\nplatform.system()\n"
        ),
    }
    for name, text in bad.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    assert process_starts(modules_of(tmp_path)) == [
        "rlstreams.show.starts calls subprocess.run",
        "rlstreams.show.starts calls os.fork",
        "rlstreams.show.starts calls context.Process",
        "rlstreams.show.starts calls asyncio.create_subprocess_exec",
        "rlstreams.show.starts imports subprocess.Popen",
    ]
