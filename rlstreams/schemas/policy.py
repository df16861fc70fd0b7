"""Facts about weights: published, asked for, loaded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One way to pull: the channel's name and an address that only this channel reads."""

    channel: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyPublished:
    """Version `policy_version` can be pulled. A number never gets a second content."""

    model: str
    policy_version: int
    weight_hash: str  # of names, dtypes, shapes and bits: see README.md
    epoch: int
    instance: str
    step: int  # the step that made it; 0 for the model folder
    num_bytes: int
    layout: str  # JSON: [[name, dtype, shape], ...] in sending order
    endpoints: tuple[Endpoint, ...]
    versions_served: tuple[int, ...]
    published_at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file of the weight store: an anchor, or what differs from another version."""

    name: str
    base_version: int  # NO_VERSION: an anchor
    num_bytes: int
    checksum: str  # SHA-256 of all but its last 32 bytes, which are the same


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStored:
    """Version `policy_version` is in the weight store, and so reachable for good."""

    model: str
    policy_version: int
    weight_hash: str
    epoch: int
    instance: str
    address: str  # of the store: a folder, or a URL
    files: tuple[StoredFile, ...]  # written for it; none: it was there
    oldest_version: int  # that the store still has
    missing: tuple[int, ...]  # versions that were passed over since the event before
    seconds: float  # from its start to the last byte
    stored_at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PullRequested:
    """A worker is ready to receive `policy_version`."""

    worker: str
    instance: str
    role: str
    request_id: str
    policy_version: int
    channel: str
    address: str  # where the receiver listens, as its channel needs it; may be empty
    requested_at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoaded:
    """A worker holds a version; its samples name this event by `load_id`."""

    worker: str
    instance: str
    role: str
    load_id: str
    policy_version: int
    weight_hash: str  # the announced one; `verified` says whether it was computed here
    epoch: int
    channel: str
    num_bytes: int
    seconds: float  # from the request to the checked weights
    paused_s: float  # how long generation stood still for it
    loaded_at_ms: int
    # "weight_hash": computed from what came. "transfer": a server took it, which checked the
    # sender's checksum of the bytes on the way. "": of a release without this field.
    verified: str = ""
