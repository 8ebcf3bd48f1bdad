"""Invariant 7: what people audit is as it was written, and GridFS holds the files that documents name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, ClassVar

from agentrl.documents.status import APPLIED_STEPS, DataStatus, RecordStatus
from agentrl.store.admin.check.findings import Findings, Invariant, Problem
from agentrl.store.admin.check.reading import CheckOptions, Section, Snapshot, Whole
from agentrl.store.mechanics.blobs import CHECKSUMS, MARK, changed_parts, digest, moved_fields
from agentrl.store.mechanics.connection import Connection, Json
from agentrl.store.names import DATA, IMAGE, MODEL_CALL, RECORD, STEP

PACKED = (MODEL_CALL, DATA, IMAGE)
"""Collections with files in GridFS."""

_SAMPLED = frozenset(
    {RecordStatus.COMPLETED, RecordStatus.SCORING, RecordStatus.SCORED, RecordStatus.READY,
     RecordStatus.ABANDONED}
)  # fmt: skip


class Contents(Section):
    """Checks the documents of one collection against the checksums that were written with them."""

    fields: ClassVar = {}
    page_size = 32

    def __init__(self, connection: Connection, options: CheckOptions, collection: str) -> None:
        super().__init__(connection, options)
        self.collection = collection

    async def inspect(self, moment: Snapshot, page: list[Json], findings: Findings) -> None:
        for document in page:
            key, name = document["_id"], f"{self.collection} {document['_id']}"
            findings.count(Invariant.CONTENTS, "checksums", len(document.get(CHECKSUMS, {})))
            findings.add(
                Invariant.CONTENTS,
                key,
                [
                    Problem(name, f"{part} as it was written", f"sha256 {stored}", f"sha256 {now}")
                    for part, stored, now in changed_parts(self.collection, document)
                ],
            )
            if self._is_due(document) and not document.get(CHECKSUMS):
                findings.add(Invariant.CONTENTS, key, [Problem(name, CHECKSUMS, "one or more", "none")])

    def _is_due(self, document: Json) -> bool:
        """Return whether a checksum is written before a document is as this one is."""
        if self.collection == RECORD:
            return document["status"] in _SAMPLED
        return self.collection != STEP or document["status"] in APPLIED_STEPS


class Images(Section):
    """Checks every image against its ``_id``, the hash of its bytes."""

    collection = IMAGE
    fields: ClassVar = {"data": 1, MARK: 1}
    page_size = 32

    async def inspect(self, moment: Snapshot, page: list[Json], findings: Findings) -> None:
        for image in (image for image in page if not image.get(MARK)):
            findings.count(Invariant.CONTENTS, "images")
            found = hashlib.sha256(image["data"]).hexdigest()
            if found != image["_id"]:
                problem = Problem(f"Image {image['_id']}", "its bytes", f"sha256 {image['_id']}", found)
                findings.add(Invariant.CONTENTS, image["_id"], [problem])


class Files(Section):
    """Checks the GridFS files of one collection's documents, which are named by their digests."""

    fields: ClassVar = {"length": 1}
    page_size = 16

    def __init__(self, connection: Connection, options: CheckOptions, owner: str) -> None:
        super().__init__(connection, options)
        self.owner = owner
        self.collection = f"{owner}.packed.files"

    async def inspect(self, moment: Snapshot, page: list[Json], findings: Findings) -> None:
        for file in page:
            findings.count(Invariant.CONTENTS, "files")
            expected = digest(file["_id"])
            chunks = moment.each(
                f"{self.owner}.packed.chunks", {"files_id": file["_id"]}, {"data": 1}, by="n"
            )
            found = hashlib.sha256()
            async for chunk in chunks:
                found.update(chunk["data"])
            is_changed = found.hexdigest()[: len(expected)] != expected
            if is_changed and not await _is_quarantined(moment, self.owner, file["_id"]):
                problem = Problem(
                    f"{self.collection} {file['_id']}", "its bytes as they were written",
                    f"sha256 {expected}…", f"sha256 {found.hexdigest()}",
                )  # fmt: skip
                findings.add(Invariant.CONTENTS, file["_id"], [problem])


class StrayFiles(Whole):
    """Names the GridFS files that no document names, and the documents whose files are gone."""

    async def inspect(self, moment: Snapshot, findings: Findings) -> None:
        for owner in PACKED:
            files = {
                file["_id"]: file for file in await moment.find(f"{owner}.packed.files", {}, {"length": 1})
            }
            named: dict[str, str] = {}
            async for document in moment.each(owner, {MARK: {"$exists": True}}, {MARK: 1}):
                named |= dict.fromkeys(moved_fields(document), f"{owner} {document['_id']}")
            findings.add(
                Invariant.CONTENTS,
                None,
                [
                    Problem(document, "its file in GridFS", file, "none")
                    for file, document in named.items()
                    if file not in files and not await _is_quarantined(moment, owner, file)
                ],
            )
            chunks = await moment.aggregate(f"{owner}.packed.chunks", [{"$group": {"_id": "$files_id"}}])
            _note_stray(owner, {*files, *(chunk["_id"] for chunk in chunks)} - named.keys(), findings)


async def _is_quarantined(moment: Snapshot, owner: str, file_id: str) -> bool:
    """Return whether a file's datum is quarantined, which names what is wrong with it."""
    datum = {"_id": file_id.rsplit("/", 2)[0], "status": DataStatus.QUARANTINED.value}
    return owner == DATA and bool(await moment.find(DATA, datum, {"_id": 1}))


def _note_stray(owner: str, stray: Iterable[Any], findings: Findings) -> None:
    found = sorted(map(str, stray))
    if found:
        findings.note(
            f"{owner}: {len(found)} files in GridFS belong to no document: {found[0]}"
            f"{', …' if found[1:] else ''}: a writer ended before its document, or somebody deleted it"
        )
