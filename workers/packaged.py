"""The examples that come with the package, wherever it was installed from."""

from __future__ import annotations

from pathlib import Path

from streams.errors import ConfigError

_HERE = Path(__file__).resolve().parent
_PLACES = (_HERE / "data" / "examples", _HERE.parent / "infra" / "examples")  # a wheel; a clone


def example(name: str) -> Path:
    """The file or folder `name` of the examples.

    Raises:
        ConfigError: it is in neither place; names both.
    """
    found = next((place / name for place in _PLACES if (place / name).exists()), None)
    if found is None:
        looked = " nor ".join(str(place) for place in _PLACES)
        raise ConfigError(f"the example {name} is neither in {looked}: install rlstreams again")
    return found
