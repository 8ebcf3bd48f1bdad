"""Query the training data that are stale because their policy versions are too old."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from agentrl.store.connection import Json

Spans = Literal["any", "all"]


@dataclass(frozen=True, slots=True)
class OldVersions:
    """Versions that are too old; data are stale if ``any`` or ``all`` of their ``spans`` are.

    ``ranges`` are inclusive and ascending. A run that was never resumed has one, from version 0: then the
    bounds of a document decide, which an index holds. After a resume the versions of the line of history that
    was undone can be fresher than higher ones. Then the bounds exclude most documents, and spans decide.
    """

    ranges: tuple[tuple[int, int], ...]
    spans: Spans = "any"

    @classmethod
    def below(cls, version: int, spans: Spans = "any") -> Self:
        """Return the range of all versions below ``version``."""
        return cls(((0, version - 1),) if version > 0 else (), spans)

    @property
    def query(self) -> Json:
        """Return a filter for stale data. Needs at least one range."""
        bound: Json = {self._bound: {"$lte": self.ranges[-1][1]}}
        if self._is_prefix:
            return bound
        old = [{"version": {"$gte": low, "$lte": high}} for low, high in self.ranges]
        found: Json = {"$elemMatch": {"$or": old}}
        return {**bound, "spans": found if self.spans == "any" else {"$not": {"$elemMatch": {"$nor": old}}}}

    @property
    def expression(self) -> Json:
        """Return ``query`` as an aggregation expression."""
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
        """The indexed field that bounds stale data by the newest old version."""
        return "min_version" if self.spans == "any" else "max_version"

    @property
    def _is_prefix(self) -> bool:
        """True if all versions up to the newest old one are old: the run was never resumed."""
        return len(self.ranges) == 1 and self.ranges[0][0] <= 0
