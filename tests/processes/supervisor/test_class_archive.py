"""An archive of the broker's classes is there or it is not: no start ever fails by it."""

from __future__ import annotations

import os
import subprocess
import time
import zipfile
from pathlib import Path

import pytest

from rlstreams.streams.broker import class_archive
from rlstreams.streams.broker.class_archive import ClassArchive
from rlstreams.streams.broker.java import find_java
from rlstreams.streams.log.owner_lock import is_held

DEADLINE_S = 120.0
WHOLE = 'echo whole >"$new"'
# What a JVM loads before it says its version, and a line that a broker was just writing.
LOADED = "java/lang/Object\njava/lang/String\njava/lang/Thread\njava/la"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLSTREAMS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a broker that has loaded classes."""
    (tmp_path / "broker").mkdir()
    (tmp_path / "broker/classes.lst").write_text(LOADED)
    return tmp_path / "broker"


@pytest.fixture
def jar(tmp_path: Path) -> Path:
    path = tmp_path / "kafka.jar"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("what", "one")
    return path


def fake_java(tmp_path: Path, text: str) -> Path:
    """Gets the command line of a dump; `new` is where that is to go."""
    path = tmp_path / "java"
    path.write_text(f"#!/bin/sh\nfor word; do case $word in -XX:SharedArchiveFile=*) "
                    f"new=${{word#*=}};; esac; done\n{text}\n")  # fmt: skip
    path.chmod(0o755)
    return path


def made(archive: ClassArchive, folder: Path) -> Path | None:
    """What is there once it was tried."""
    (folder / "classes.lst").write_text(LOADED)
    maker = archive.making(folder, after_s=0)
    assert maker is not None
    assert maker.wait(DEADLINE_S)
    return archive.path()


def told(java: Path, jar: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """A JVM with these options, and which class came from where."""
    words = (java, *options, "-Xlog:class+load", "-cp", jar, "-version")
    return subprocess.run(
        words, cwd=jar.parent, capture_output=True, text=True, check=False, timeout=DEADLINE_S
    )  # a crash leaves files there


def test_a_later_jvm_maps_it_and_passes_over_one_that_is_damaged(
    cache: Path, folder: Path, jar: Path
) -> None:
    """Cut short, other bytes in the middle, empty, gone: each JVM starts."""
    java = find_java()
    archive = ClassArchive(java, [jar])
    assert archive.options(folder) == (f"-XX:DumpLoadedClassList={folder / 'classes.lst'}",)
    path = made(archive, folder)
    assert path is not None
    assert {path.name, f"{archive.name.name}.lock"} == {file.name for file in cache.glob("*/*")}
    assert not (folder / "classes.lst").exists()
    options = archive.options(folder)
    mapped = told(java, jar, *options, "-Xshare:on")
    assert 0 == mapped.returncode, mapped.stdout
    assert "java.lang.Object source: shared objects file" in mapped.stdout

    whole = path.read_bytes()
    middle = len(whole) // 2
    for damaged in (whole[:middle], whole[:middle] + bytes(4096) + whole[middle + 4096 :], b""):
        path.unlink()
        path.write_bytes(damaged)
        passed_over = told(java, jar, *archive.options(folder))
        assert 0 == passed_over.returncode, passed_over.stdout
    path.unlink()
    assert 0 == told(java, jar, *options).returncode


def test_another_java_and_other_jars_have_their_own(
    cache: Path, folder: Path, jar: Path, tmp_path: Path
) -> None:
    """The file says more than its name: it counts as another once it was changed."""
    java = fake_java(tmp_path, "")
    before = ClassArchive(java, [jar]).name
    assert before == ClassArchive(java, [jar]).name
    assert before != ClassArchive(find_java(), [jar]).name
    jar.write_bytes(jar.read_bytes() + b"more")
    assert before != ClassArchive(java, [jar]).name


def test_of_two_brokers_one_has_it_made(
    cache: Path, folder: Path, jar: Path, tmp_path: Path
) -> None:
    """And nobody once it is there."""
    archive = ClassArchive(fake_java(tmp_path, WHOLE), [jar])
    first = archive.making(folder, after_s=600)
    assert first is not None
    assert archive.making(folder) is None
    first.end()
    assert made(archive, folder)
    (folder / "classes.lst").write_text(LOADED)
    assert archive.making(folder) is None


@pytest.mark.parametrize("fails", ["echo half >$new; exit 1", "echo half >$new; kill -9 $PPID"])
def test_a_dump_that_fails_or_is_killed_leaves_none(
    cache: Path, folder: Path, jar: Path, tmp_path: Path, fails: str
) -> None:
    """A disk that is full, a machine without memory: the next broker tries anew."""
    assert made(ClassArchive(fake_java(tmp_path, fails), [jar]), folder) is None
    path = made(ClassArchive(fake_java(tmp_path, WHOLE), [jar]), folder)
    assert path is not None
    assert "whole\n" == path.read_text()


def test_it_ends_with_whoever_started_the_broker(
    cache: Path, folder: Path, jar: Path, tmp_path: Path
) -> None:
    """By SIGKILL, in the middle of a dump."""
    java = fake_java(tmp_path, 'echo half >"$new"; exec sleep 600')
    archive = ClassArchive(java, [jar])
    starter = os.fork()
    if not starter:
        archive.making(folder, after_s=0)
        os.kill(os.getpid(), 9)
    os.waitpid(starter, 0)
    until_s = time.monotonic() + DEADLINE_S
    while is_held(archive.name.with_suffix(".lock")):
        assert time.monotonic() < until_s, "it lives on"
        time.sleep(0.01)
    assert archive.path() is None


def test_a_cache_that_cannot_be_written_is_no_error(
    cache: Path, folder: Path, jar: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the reason is: here a file is where the folder would be."""
    cache.write_text("no folder")
    archive = ClassArchive(find_java(), [jar])
    assert archive.making(folder, after_s=0) is None
    monkeypatch.setenv("RLSTREAMS_CACHE", "/one:two")
    assert () == ClassArchive(find_java(), [jar]).options(folder)


def test_only_ones_own_is_mapped_and_few_are_kept(
    cache: Path, folder: Path, jar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who else may write into the folder could have written its code."""
    archive = ClassArchive(fake_java(tmp_path, WHOLE), [jar])
    archive.name.parent.mkdir(parents=True)
    for number in range(9):
        old = archive.name.parent / f"{number}.jsa"
        old.touch()
        os.utime(old, (number, number))
    path = made(archive, folder)
    assert path is not None
    kept = {path.name for path in archive.name.parent.glob("*.jsa")}
    assert {path.name, "8.jsa", "7.jsa", "6.jsa"} == kept
    assert class_archive.KEPT == len(kept)
    own = os.getuid()
    monkeypatch.setattr(class_archive.os, "getuid", lambda: own + 1)
    assert not any("SharedArchiveFile" in word for word in archive.options(folder))
