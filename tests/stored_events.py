"""Examples of what a trainer says of its weight store."""

from __future__ import annotations

from typing import Any

from rlstreams.schemas.events import PolicyStored, StoredFile

HASH = "0" * 64


def policy_stored(version: int = 2, **changes: Any) -> PolicyStored:
    name = f"v{version:08d}-{HASH[:12]}.anchor"
    values = {
        "model": "policy",
        "policy_version": version,
        "weight_hash": HASH,
        "epoch": 1,
        "instance": "t1",
        "address": "/store",
        "files": (StoredFile(name=name, base_version=-1, num_bytes=700, checksum=HASH),),
        "oldest_version": 0,
        "missing": (1,),
        "seconds": 0.5,
        "stored_at_ms": 1_795_000_000_000,
    }
    return PolicyStored(**{**values, **changes})
