"""Invariant 9: nothing but its tombstone is left of what was withdrawn."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any, ClassVar, Final

from agentrl.store.admin.check.reading import Section, Snapshot, Whole
from agentrl.store.admin.check.report import Findings, Invariant
from agentrl.store.mechanics.blobs import PACKED
from agentrl.store.mechanics.connection import Json
from agentrl.store.names import RETRACTION, TOMBSTONE
from agentrl.store.schema import VALIDATORS

SEARCHED: Final = (
    *(name for name in VALIDATORS if name != TOMBSTONE),
    *(f"{name}.packed.{part}" for name in PACKED for part in ("files", "chunks")),
)
"""The collections that may not name what is withdrawn."""
_CUTS = re.compile(r"[/@:\s,;\"']|$")


class Retractions(Whole):
    """Names the retractions that a call began and did not finish."""

    async def inspect(self, moment: Snapshot, findings: Findings) -> None:
        for retraction in await moment.find(RETRACTION, {}, {"finished_at": 1}):
            findings.count(Invariant.RETRACTED, "retractions")
            if retraction.get("finished_at") is None:
                what, expected = "finished", "a call of agentrl retract that ends"
                name = f"Retraction {retraction['_id']}"
                findings.wrong(Invariant.RETRACTED, None, name, what, expected, "an unfinished one")


class Withdrawn(Section):
    """Searches one collection for the ids in tombstones, in every text of every document."""

    fields: ClassVar = {}
    page_size = 100
    _ids: frozenset[str] = frozenset()

    async def scan(self, findings: Findings) -> None:
        await self._load()
        if self._ids:
            await super().scan(findings)

    async def look_again(self, keys: Collection[Any], findings: Findings) -> None:
        await self._load()
        await super().look_again(keys, findings)

    async def _load(self) -> None:
        deleted = self.connection.collection(TOMBSTONE).find({"deleted_at": {"$ne": None}}, {"_id": 1})
        self._ids = frozenset([stone["_id"] async for stone in deleted])

    async def inspect(self, moment: Snapshot, page: list[Json], findings: Findings) -> None:
        epochs = {"/".join(key.split("/")[:2]) for key in self._ids}
        begin = re.compile("|".join(re.escape(f"{epoch}/") for epoch in sorted(epochs)))
        findings.count(Invariant.RETRACTED, "documents searched", len(page))
        for document in page:
            for text in _texts(document):
                for found in begin.finditer(text):
                    cuts = (text[found.start() : cut.start()] for cut in _CUTS.finditer(text, found.end()))
                    for name in self._ids.intersection(cuts):
                        what = "no name of what is withdrawn"
                        findings.wrong(
                            Invariant.RETRACTED, document["_id"], f"{self.collection} {document['_id']}",
                            what, "only its Tombstone", name,
                        )  # fmt: skip


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in a document, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
