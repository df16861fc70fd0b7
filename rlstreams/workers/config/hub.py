"""The folder of a model: a path, or `hf:ORG/NAME[@REVISION]` of the Hugging Face hub.

A model that is on this machine is used as it is, without a connection, so that all roles of a run
read the same files; the hash of the weights is in the trainer's claim all the same. A revision
pins them. The library's own variables count: `HF_HOME`, `HF_TOKEN`, `HF_ENDPOINT`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.data import HUB

# No pickles, no copies of the weights in other formats.
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")


def is_hub_name(path: str) -> bool:
    """Whether `path` names a model of the hub."""
    return path.startswith(HUB)


def found_folder(path: str) -> Path | None:
    """The folder, if it is here; None for a model of the hub that was never fetched.

    Raises:
        ConfigError: a name that cannot be one, or no path at all.
    """
    if not path:
        raise ConfigError("model.path is empty; name a Hugging Face folder, or hf:ORG/NAME")
    if not is_hub_name(path):
        return Path(path)
    repository, revision = _parsed(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(
            repository, revision=revision, allow_patterns=_FILES, local_files_only=True
        ))  # fmt: skip
    except LocalEntryNotFoundError:
        return None


def model_folder(path: str) -> Path:
    """The folder; a model of the hub is fetched first if it is not here.

    Raises:
        ConfigError: as `found_folder`; or it cannot be fetched.
    """
    folder = found_folder(path)
    if folder is not None:
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    repository, revision = _parsed(path)
    print(f"fetching {repository} from the Hugging Face hub", file=sys.stderr)  # noqa: T201
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=_FILES))
    except (OSError, ValueError, HfHubHTTPError) as err:
        first = str(err).strip().split("\n")[0].removeprefix("Got: ")
        raise ConfigError(
            f"model.path: {path} cannot be fetched: {first}; check the name and the connection, "
            "set HF_TOKEN for a model behind a licence, or name a folder"
        ) from err


def _parsed(path: str) -> tuple[str, str | None]:
    """Repository and revision."""
    name = path.removeprefix(HUB)
    if not _NAME.fullmatch(name):
        raise ConfigError(f"model.path must be a folder or hf:ORG/NAME[@REVISION], got {path!r}")
    repository, _, revision = name.partition("@")
    return repository, revision or None
