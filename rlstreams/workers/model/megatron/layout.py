"""Cut of a model over ranks: tensor, pipeline and expert parallelism. Pure.

Ranks count as in megatron-core's order `tp-ep-dp-pp`: neighbours share a layer, far ones a stage.
Experts are spread over ranks that compute different rows, so `ep` needs no ranks of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlstreams.streams.log.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Ranks of a model; `Layout()` is one process."""

    ranks: int = 1
    tp: int = 1  # ranks that share each matrix
    pp: int = 1  # stages, each of some layers
    ep: int = 1  # ranks over which the experts of a layer are spread
    asked_by: str = "trainer"  # section of the configuration, for messages

    @property
    def dp(self) -> int:
        """Ranks of a stage that compute different rows."""
        return self.ranks // (self.tp * self.pp)

    def tp_rank(self, rank: int) -> int:
        """Rank within the tensor-parallel group, which shares each matrix."""
        return rank % self.tp

    def dp_rank(self, rank: int) -> int:
        """Data-parallel rank: the number of the rows that a rank computes."""
        return rank // self.tp % self.dp

    def ep_rank(self, rank: int) -> int:
        """Expert-parallel rank: the number of the experts that a rank has."""
        return self.dp_rank(rank) % self.ep

    def stage(self, rank: int) -> int:
        """Pipeline stage: the number of the layers that a rank has."""
        return rank // (self.tp * self.dp)

    def peers(self, rank: int, *, of_experts: bool) -> list[int]:
        """Ranks, `rank` included, that hold the same rows of a weight, and so sum their
        gradients."""

        def place(other: int) -> tuple[int, int, int]:
            expert = self.ep_rank(other) if of_experts else 0
            return self.stage(other), self.tp_rank(other), expert

        return [other for other in range(self.ranks) if place(other) == place(rank)]

    def neighbour(self, rank: int, stages: int) -> int:
        """The rank of the same place, `stages` stages later."""
        return rank + stages * self.tp * self.dp

    def check(self, facts: Sequence[tuple[str, int, str]], num_experts: int) -> None:
        """
        Args:
            facts: name of a number, the number, and the part of the layout that must divide it.

        Raises:
            ConfigError: a number is not divided; names both numbers and those that would fit.
        """
        each = self.tp * self.pp
        if self.ranks % each:
            raise ConfigError(
                f"{self.asked_by}.ranks is {self.ranks}, which tp {self.tp} x pp {self.pp} = "
                f"{each} ranks do not divide: {max(1, self.ranks // each) * each} would fit"
            )
        if num_experts and self.tp > 1:
            raise ConfigError(
                f"{self.asked_by}.layout.tp is {self.tp}, but a mixture of experts is cut by "
                "ep and pp alone: set tp to 1"
            )
        if not num_experts and self.ep > 1:
            raise ConfigError(
                f"{self.asked_by}.layout.ep is {self.ep}, but the model has no experts: set ep to 1"
            )
        self._divides(f"{self.asked_by}.ranks / (tp x pp)", self.dp, "ep")
        for name, number, part in facts:
            self._divides(f"the model's {name}", number, part)

    def _divides(self, name: str, number: int, part: str) -> None:
        size: int = getattr(self, part)
        if number % size:
            fits = [n for n in range(1, number + 1) if number % n == 0]
            near = ", ".join(map(str, fits[:8]))
            raise ConfigError(
                f"{self.asked_by}.layout.{part} is {size}, which does not divide {name}, {number}: "
                f"it may be {near}"
            )
