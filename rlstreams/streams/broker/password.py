"""The password of an embedded broker: a user who cannot read the run's folder cannot use its log.

The port is open to every user of the machine. With a file `password` in its folder the broker
takes SASL PLAIN only, from clients and on its controller's port, and both listen on loopback.
Without the file it asks for none. An empty file never means that: the next start fills it anew.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.synced import write_whole

FILE = "password"
USER = "rlstreams"
_WRITABLE = r"[!#-\[\]-~]"  # as they are, in quotes, in a file of Java properties
_LOGIN = "org.apache.kafka.common.security.plain.PlainLoginModule required"
_CONTROLLER_LOGIN = "listener.name.controller.plain.sasl.jaas.config"


def make_password(folder: Path) -> None:
    """Write a password for the folder's owner alone, unless there is one. Hold the folder's lock.

    Raises:
        ConfigError: the file's content cannot be a password.
    """
    path = folder / FILE
    if not path.is_file() or not path.read_bytes().strip():
        write_whole(path, secrets.token_hex(32).encode(), is_private=True)
    _password(folder)


def broker_settings(folder: Path) -> Mapping[str, str]:
    """Return broker properties; none without a password."""
    controller = dict(controller_settings(folder))
    if not controller:
        return {}
    return controller | {
        "inter.broker.listener.name": "SASL_PLAINTEXT",
        "listener.name.sasl_plaintext.plain.sasl.jaas.config": controller[_CONTROLLER_LOGIN],
        "sasl.mechanism.inter.broker.protocol": "PLAIN",
    }


def controller_settings(folder: Path) -> Mapping[str, str]:
    """Return properties of the node as a controller alone; none without a password."""
    if not (password := _password(folder)):
        return {}
    return {
        "listener.security.protocol.map": "CONTROLLER:SASL_PLAINTEXT,SASL_PLAINTEXT:SASL_PLAINTEXT",
        _CONTROLLER_LOGIN: (
            f'{_LOGIN} username="{USER}" password="{password}" user_{USER}="{password}";'
        ),
        "sasl.enabled.mechanisms": "PLAIN",
        "sasl.mechanism.controller.protocol": "PLAIN",
    }


def client_options(folder: Path) -> Mapping[str, str]:
    """librdkafka properties for clients of the broker in `folder`; none without a password."""
    return login(password) if (password := _password(folder)) else {}


def login(password: str) -> Mapping[str, str]:
    """librdkafka properties of a client that has the password, or a reference to it."""
    return {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanisms": "PLAIN",
        "sasl.username": USER,
        "sasl.password": password,
    }


def _password(folder: Path) -> str:
    """Read the password; "": there is no such file.

    Raises:
        ConfigError: the file is empty, or holds a character with a meaning in Kafka's files.
    """
    path = folder / FILE
    try:
        text = path.read_text(encoding="latin-1").strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    cure = "remove the file, and the broker's next start makes a new one"
    if not text:
        raise ConfigError(f"{path} is empty, where a password was: put it back, or {cure}")
    if wrong := sorted(set(re.sub(_WRITABLE, "", text))):
        raise ConfigError(
            f"{path} holds {', '.join(map(repr, wrong))}: a password is of printable ASCII "
            f'characters other than space, `"` and `\\`; correct it, or {cure}'
        )
    return text
