"""Checks that the sections of a configuration share."""

from __future__ import annotations

from streams.errors import ConfigError


def positive(section: str, **values: float) -> None:
    """Refuse a value of 0 or below, by its full name."""
    for name, value in values.items():
        if value <= 0:
            raise ConfigError(f"{section}.{name} must be above 0, got {value}")


def not_negative(section: str, **values: float) -> None:
    """Refuse a negative value, by its full name."""
    for name, value in values.items():
        if value < 0:
            raise ConfigError(f"{section}.{name} must be 0 or above, got {value}")
