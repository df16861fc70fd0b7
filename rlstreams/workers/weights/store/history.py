"""Versions in a store, and the shortest way to each of them: an anchor, then deltas."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from rlstreams.workers.weights.channel import VersionGoneError, WeightError
from rlstreams.workers.weights.store.place import Place
from rlstreams.workers.weights.store.sums import OverwrittenError, Sums, complete
from rlstreams.workers.weights.store.version_file import FileName, Header, Stamp, VersionFile

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
_SHOWN = 10  # versions that a message names


@dataclass(frozen=True, slots=True)
class HeldVersion:
    """A version in memory, to start from."""

    stamp: Stamp
    tensors: Mapping[str, torch.Tensor]  # on the CPU, in name order; never written to
    sums: Sums = field(default_factory=dict)  # as they were when its hash was checked


class Chains:
    """Versions and deltas by a listing of file names; pure."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        parsed = ((FileName.parse(name), size) for name, size in sizes.items())
        self._sizes = {name: size for name, size in parsed if name is not None}
        self._deltas: dict[Stamp, list[FileName]] = {}
        for name in sorted(self._sizes, key=str):
            if name.base is not None:
                self._deltas.setdefault(name.stamp, []).append(name)

    @property
    def names(self) -> Iterable[FileName]:
        """All files of versions."""
        return self._sizes

    @property
    def stamps(self) -> list[Stamp]:
        """Versions that have a file, the lowest first."""
        return sorted({name.stamp for name in self._sizes})

    @property
    def anchors(self) -> list[Stamp]:
        """Versions that have an anchor, the lowest first."""
        return sorted(name.stamp for name in self._sizes if name.base is None)

    def reachable(self) -> list[int]:
        """Versions with an anchor and all deltas to them, the lowest first."""
        reached = set(self.anchors)
        for stamp in self.stamps:  # a base has a lower number
            if any(name.base in reached for name in self._deltas.get(stamp, ())):
                reached.add(stamp)
        return sorted({stamp.policy_version for stamp in reached})

    def way(self, stamp: Stamp, held: Stamp | None = None) -> list[FileName] | str:
        """The files to apply one after the other, of the fewest bytes; or the reason that there are
        none.

        Args:
            held: a version in memory to start from, beside anchors.
        """
        found: list[tuple[int, list[FileName]]] = []
        behind: list[FileName] = []  # deltas from `at` on, the last one first
        at, cost = stamp, 0
        while True:
            if at == held:
                found.append((cost, behind[::-1]))
            anchor = FileName(stamp=at, base=None)
            if anchor in self._sizes:
                found.append((cost + self._sizes[anchor], [anchor, *behind[::-1]]))
            delta = next(iter(self._deltas.get(at, ())), None)
            if delta is None or delta.base is None or delta.base >= at:
                break
            behind.append(delta)
            cost += self._sizes[delta]
            at = delta.base
        if found:
            return min(found, key=lambda one: one[0])[1]
        if behind:
            return f"{behind[-1]} needs {at}, of which there is neither anchor nor delta"
        return f"there is no file of {at}"


class WeightHistory:
    """Reads versions of one run from a store."""

    def __init__(self, place: Place, run: str) -> None:
        self._place = place
        self._run = run

    def versions(self) -> list[int]:
        """Versions that can be reached, the lowest first.

        Raises:
            WeightError: the store cannot be listed.
        """
        return self._chains().reachable()

    def weights_at(
        self,
        policy_version: int,
        weight_hash: str,
        deadline_s: float,
        held: HeldVersion | None = None,
    ) -> HeldVersion:
        """A version, checked against `weight_hash`.

        Args:
            weight_hash: as the log has it.
            held: its tensors are copied, not changed.

        Raises:
            VersionGoneError: its file, or one that it builds on, is not there; names it.
            WeightError: a file is damaged, of another run or version, or cannot be read in time;
                names file and version.
        """
        what = f"policy version {policy_version} from store {self._place.address}"
        until_s = time.monotonic() + deadline_s

        def check() -> None:
            if time.monotonic() > until_s:
                raise WeightError(f"{what}: not read within {deadline_s:g} s")

        stamp = Stamp.of(policy_version, weight_hash)
        return within(deadline_s, what, lambda: self._load(stamp, weight_hash, held, check))

    def _load(
        self, stamp: Stamp, weight_hash: str, held: HeldVersion | None, check: Callable[[], None]
    ) -> HeldVersion:
        chains = self._chains()
        way = chains.way(stamp, held.stamp if held else None)
        if isinstance(way, str):
            raise VersionGoneError(
                f"policy version {stamp.policy_version} is no longer served: in store "
                f"{self._place.address} {way}; versions that it has: {some(chains.reachable())}"
            )
        tensors: dict[str, torch.Tensor] = {}
        sums: Sums = {}
        if held is not None and (not way or way[0].base is not None):
            tensors = {name: tensor.clone() for name, tensor in held.tensors.items()}
            sums = {name: list(known) for name, known in held.sums.items()}
        for name in way:
            check()
            self._apply(name, tensors, sums, check)
        what = f"{self._place.address}/{way[-1] if way else stamp}"
        what += f" (policy version {stamp.policy_version})"
        try:
            found = complete(tensors, sums)
        except OverwrittenError as err:
            raise WeightError(
                f"{what}: it was applied to the version in memory, {held and held.stamp}, whose "
                f"{err} was overwritten since it was checked"
            ) from err
        if found != weight_hash:
            raise WeightError(f"{what}: it makes weights {found}, the log says {weight_hash}")
        return HeldVersion(stamp, dict(sorted(tensors.items())), sums)

    def _apply(
        self,
        name: FileName,
        tensors: dict[str, torch.Tensor],
        sums: Sums,
        check: Callable[[], None],
    ) -> None:
        address = self._place.address
        try:
            with self._place.reading(str(name)) as file:
                version = VersionFile(file, address, name)
                if version.header.run != self._run:
                    raise WeightError(
                        f"{address}/{name} (policy version {name.stamp.policy_version}): it is of "
                        f"run {version.header.run!r}, this is {self._run!r}"
                    )
                version.load_into(tensors, sums, check)
        except FileNotFoundError as err:
            raise VersionGoneError(
                f"policy version {name.stamp.policy_version} is no longer served: {address}/{name} "
                "was removed"
            ) from err
        except OSError as err:
            raise WeightError(
                f"{address}/{name} (policy version {name.stamp.policy_version}): {err}"
            ) from err

    def header(self, name: FileName) -> Header:
        """A file's header; raises as `weights_at`, and OSError."""
        with self._place.reading(str(name)) as file:
            return VersionFile(file, self._place.address, name).header

    def _chains(self) -> Chains:
        try:
            return Chains(self._place.sizes())
        except OSError as err:
            raise WeightError(f"store {self._place.address} cannot be listed: {err}") from err


def within(deadline_s: float, what: str, work: Callable[[], T]) -> T:
    """Run `work` in a thread of its own: a file system that hangs is left behind.

    Raises:
        WeightError: `work` takes longer.
    """
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as err:  # noqa: BLE001  (raised again by the caller)
            failed.append(err)

    thread = threading.Thread(target=run, name="weight-store-read", daemon=True)
    thread.start()
    thread.join(deadline_s)
    if failed:
        raise failed[0]
    if not found:
        raise WeightError(f"{what}: not read within {deadline_s:g} s")
    return found[0]


def some(versions: Sequence[int]) -> str:
    """The versions, as ranges; the last ones if there are many."""
    spans: list[list[int]] = []
    for version in versions:
        if spans and version == spans[-1][1] + 1:
            spans[-1][1] = version
        else:
            spans.append([version, version])
    texts = [str(low) if low == high else f"{low} to {high}" for low, high in spans]
    more = f"{len(texts) - _SHOWN:,} more spans, " if len(texts) > _SHOWN else ""
    return more + ", ".join(texts[-_SHOWN:]) if texts else "none"
