"""The name of an image of the roles says what is in it."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from infra.hosts import image


def test_another_content_is_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where only a file's name, a package's version or what the base is made by differs."""
    monkeypatch.setattr(image, "ROOT", tmp_path)
    some = list(islice(image.distributions(), 3))  # of all of them it takes longer
    monkeypatch.setattr(image, "distributions", lambda: some)
    for name in ("rlstreams/one.py", "pyproject.toml", "infra/kafka/base.sh"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1\n")
    names = [image._fingerprint(), image._fingerprint()]
    (tmp_path / "rlstreams/one.py").rename(tmp_path / "rlstreams/two.py")
    names.append(image._fingerprint())
    for name in ("pyproject.toml", "infra/kafka/base.sh"):
        (tmp_path / name).write_text("2\n")
        names.append(image._fingerprint())
    monkeypatch.setattr(image, "distributions", lambda: [])
    names.append(image._fingerprint())
    assert names[0] == names[1]
    assert 5 == len(set(names))
