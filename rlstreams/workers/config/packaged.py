"""The examples that come with the package, wherever it was installed from."""

from __future__ import annotations

from pathlib import Path

from rlstreams.streams.log.errors import ConfigError

_HERE = Path(__file__).resolve().parents[1]
_PLACES = (_HERE / "data" / "examples", _HERE.parents[1] / "infra" / "examples")  # a wheel; a clone


def example(name: str) -> Path:
    """The file or folder `name` of the examples.

    Raises:
        ConfigError: it is in neither place; names both, and the files that are there.
    """
    found = next((place / name for place in _PLACES if name and (place / name).exists()), None)
    if found is None:
        looked = " nor ".join(str(place) for place in _PLACES)
        there = sorted({file.name for place in _PLACES for file in place.glob("*.toml")})
        advice = f"there are {', '.join(there)}" if there else "install rlstreams again"
        raise ConfigError(f"the example {name!r} is neither in {looked}: {advice}")
    return found
