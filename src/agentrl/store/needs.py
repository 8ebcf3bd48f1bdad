"""Exclude tasks from a claim: those that need a tool server, or a scorer, that is down."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.store.mechanics.connection import Json


@dataclass(frozen=True, slots=True)
class Needs:
    """Tool servers and scorers. A task needs the servers in its ``tools``, or every server without them."""

    servers: frozenset[str] = frozenset()
    scorers: frozenset[str] = frozenset()
    known: frozenset[str] | None = None
    """If not None, a task that names any other server needs something of these too: a manager is down, and
    nobody knows the names of its servers."""

    @property
    def excluded(self) -> Json:
        """Return a filter for the tasks that need none of them."""
        needed: list[Json] = []
        if self.servers:
            needed += [{"tools": None}, {"tools": {"$in": sorted(self.servers)}}]
        if self.known is not None:
            needed.append({"tools": {"$elemMatch": {"$nin": sorted(self.known)}}})
        if self.scorers:
            needed.append({"scorer": {"$in": sorted(self.scorers)}})
        return {"$nor": needed} if needed else {}


NOTHING = Needs()
