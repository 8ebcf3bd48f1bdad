"""Policy versions whose tokens are too old to train, and the training data that this makes stale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from agentrl.store.connection import Json

Spans = Literal["any", "all"]


@dataclass(frozen=True, slots=True)
class OldVersions:
    """Versions that are too old, and how many old ``spans`` make training data stale: any, or only all.

    ``ranges`` are inclusive and ascending. A run that was never resumed has one, from version 0: then the
    bounds of a document decide, which an index holds. After a resume the versions of the line of history that
    was undone can be fresher than higher ones. Then the bounds exclude most documents, and spans decide.
    """

    ranges: tuple[tuple[int, int], ...]
    spans: Spans = "any"

    @classmethod
    def below(cls, version: int, spans: Spans = "any") -> Self:
        """Every version below ``version``."""
        return cls(((0, version - 1),) if version > 0 else (), spans)

    @property
    def query(self) -> Json:
        """A filter for stale data; there must be a range."""
        bound: Json = {self._bound: {"$lte": self.ranges[-1][1]}}
        if self._is_prefix:
            return bound
        old = [{"version": {"$gte": low, "$lte": high}} for low, high in self.ranges]
        found: Json = {"$elemMatch": {"$or": old}}
        return {**bound, "spans": found if self.spans == "any" else {"$not": {"$elemMatch": {"$nor": old}}}}

    @property
    def expression(self) -> Json:
        """``query`` as an aggregation expression on one document."""
        bound: Json = {"$lte": [f"${self._bound}", self.ranges[-1][1]]}
        if self._is_prefix:
            return bound
        old = [{"$and": [{"$gte": ["$$version", low]}, {"$lte": ["$$version", high]}]}
               for low, high in self.ranges]  # fmt: skip
        each = {"$map": {"input": "$spans.version", "as": "version", "in": {"$or": old}}}
        quantifier = "$anyElementTrue" if self.spans == "any" else "$allElementsTrue"
        return {"$and": [bound, {quantifier: [each]}]}

    @property
    def _bound(self) -> str:
        """The field that is at most the newest old version in all stale data."""
        return "min_version" if self.spans == "any" else "max_version"

    @property
    def _is_prefix(self) -> bool:
        """Every version up to the newest old one is old."""
        return len(self.ranges) == 1 and self.ranges[0][0] <= 0
