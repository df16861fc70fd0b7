"""The lock of the jars and what is refused, without a connection."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from rlstreams.streams.broker.jars import Jar, check, classpath, lock_file, locked
from rlstreams.streams.broker.java import find_java, java_version
from rlstreams.streams.log.errors import BrokerError, ConfigError


def make_jar(content: bytes) -> Jar:
    digest = hashlib.sha256(content).hexdigest()
    return Jar(group="org.example", artifact="thing", version="1.2", sha256=digest)


def test_the_lock_pins_every_jar_by_its_own_hash() -> None:
    """46 coordinates, no file name twice, and a Kafka that keeps its transaction markers."""
    jars = locked(lock_file().read_text(encoding="utf-8"))

    assert len({jar.file_name for jar in jars}) == len(jars) == 46
    kafka = {jar.version for jar in jars if jar.group == "org.apache.kafka"}
    assert kafka == {"4.2.1"}


@pytest.mark.parametrize("line", ["a:b sha256:" + "0" * 64, "a:b:1", "a:b:1 sha256:00"])
def test_a_malformed_line_of_the_lock_is_named(line: str) -> None:
    with pytest.raises(ConfigError, match="line 2"):
        locked("\n" + line)


def test_another_content_is_refused_with_both_hashes(tmp_path: Path) -> None:
    """A jar that was changed or cut short never gets onto the class path."""
    jar = make_jar(b"the pinned content")
    path = tmp_path / jar.file_name
    path.write_bytes(b"the pinned content")
    check(path, jar)

    path.write_bytes(b"the pinned")
    with pytest.raises(BrokerError, match=rf"org\.example:thing:1\.2.*{jar.sha256}"):
        check(path, jar)


def test_a_folder_of_jars_that_lacks_one_is_refused_without_fetching(tmp_path: Path) -> None:
    """`jars_dir` is for machines without a connection: nothing is fetched then."""
    said: list[str] = []

    with pytest.raises(BrokerError, match="does not exist"):
        classpath(str(tmp_path), said.append)
    assert said == []


def test_a_folder_of_another_machine_is_named(tmp_path: Path) -> None:
    """A run that was copied brings its configuration."""
    with pytest.raises(BrokerError, match=r"broker\.jars_dir is '.*gone'"):
        classpath(str(tmp_path / "gone"))


def test_without_a_connection_the_jar_and_the_way_out_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is downloaded is said first; then the error names a jar and `jars_dir`."""
    monkeypatch.setenv("RLSTREAMS_CACHE", str(tmp_path))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")  # refuses at once
    (tmp_path / "jars").mkdir()
    (tmp_path / "jars" / "lz4-java-1.10.1.jar").write_bytes(b"cut short")
    said: list[str] = []

    with pytest.raises(BrokerError, match=r"at\.yawk\.lz4:lz4-java:1\.10\.1.*broker\.jars_dir"):
        classpath(say=said.append)

    assert said == [f"downloading 46 jars of Apache Kafka 4.2.1 (about 45 MB) to {tmp_path}/jars"]
    assert list(tmp_path.glob("staging-*")) == []


def test_a_java_that_does_not_run_has_no_version(tmp_path: Path) -> None:
    """The stub of a system without Java exists and fails; so does a file that is no program."""
    stub = tmp_path / "java"
    stub.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    stub.chmod(0o755)

    assert java_version(stub) == 0
    assert java_version(tmp_path / "none") == 0


def test_a_java_that_does_not_run_is_named_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there: to install one is no cure where a system has no room, or no /proc."""
    stub = tmp_path / "bin/java"
    stub.parent.mkdir()
    stub.write_text("#!/bin/sh\necho Could not create a thread >&2\nexit 1\n", encoding="utf-8")
    stub.chmod(0o755)
    monkeypatch.setattr("rlstreams.streams.broker.java._candidates", lambda: iter([stub]))
    with pytest.raises(BrokerError, match=r"bin/java \(Could not create a thread\)"):
        find_java()


def test_a_java_is_asked_once(tmp_path: Path) -> None:
    """A JVM starts for it, and several places ask."""
    stub = tmp_path / "java"
    stub.write_text(f"#!/bin/sh\necho asked >>{tmp_path}/asked\necho 'version \"21.0.1\"' >&2\n")
    stub.chmod(0o755)
    assert (21, 21) == (java_version(stub), java_version(stub))
    assert "asked\n" == (tmp_path / "asked").read_text()


def test_a_home_that_cannot_be_written_is_named_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RLSTREAMS_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(BrokerError, match=r"cannot be kept in .* RLSTREAMS_CACHE"):
        classpath()
