"""Invariant 7: what people audit is as it was written, and GridFS holds the files that documents name."""

from __future__ import annotations

import hashlib
from typing import ClassVar

from agentrl.documents.status import APPLIED_STEPS, DataStatus, RecordStatus
from agentrl.store.admin.check.reading import CheckOptions, Section, Snapshot, Whole
from agentrl.store.admin.check.report import Findings, Invariant
from agentrl.store.mechanics.blobs import CHECKSUMS, MARK, PACKED, changed_parts, digest, moved_fields
from agentrl.store.mechanics.connection import Connection, Json
from agentrl.store.names import DATA, IMAGE, RECORD, STEP

_SAMPLED = frozenset(
    {RecordStatus.COMPLETED, RecordStatus.SCORING, RecordStatus.SCORED, RecordStatus.READY,
     RecordStatus.ABANDONED}
)  # fmt: skip


class Contents(Section):
    """Checks the documents of one collection against the checksums that were written with them."""

    fields: ClassVar = {}
    page_size = 32

    async def inspect(self, moment: Snapshot, page: list[Json], findings: Findings) -> None:
        for document in page:
            key, name = document["_id"], f"{self.collection} {document['_id']}"
            findings.count(Invariant.CONTENTS, "checksums", len(document.get(CHECKSUMS, {})))
            for part, stored, now in changed_parts(self.collection, document):
                what, expected = f"{part} as it was written", f"sha256 {stored}"
                findings.wrong(Invariant.CONTENTS, key, name, what, expected, f"sha256 {now}")
            if self._is_due(document) and not document.get(CHECKSUMS):
                findings.wrong(Invariant.CONTENTS, key, name, CHECKSUMS, "one or more", "none")

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
            actual = hashlib.sha256(image["data"]).hexdigest()
            if actual != image["_id"]:
                key, expected = image["_id"], f"sha256 {image['_id']}"
                findings.wrong(Invariant.CONTENTS, key, f"Image {key}", "its bytes", expected, actual)


class Files(Section):
    """Checks the GridFS files of one collection's documents, which are named by their digests."""

    fields: ClassVar = {"length": 1}
    page_size = 16

    def __init__(self, connection: Connection, options: CheckOptions, owner: str) -> None:
        super().__init__(connection, options, f"{owner}.packed.files")
        self.owner = owner

    async def inspect(self, moment: Snapshot, page: list[Json], findings: Findings) -> None:
        for file in page:
            findings.count(Invariant.CONTENTS, "files")
            expected = digest(file["_id"])
            chunks = moment.each(
                f"{self.owner}.packed.chunks", {"files_id": file["_id"]}, {"data": 1}, by="n"
            )
            actual = hashlib.sha256()
            async for chunk in chunks:
                actual.update(chunk["data"])
            is_changed = actual.hexdigest()[: len(expected)] != expected
            if is_changed and not await _is_quarantined(moment, self.owner, file["_id"]):
                findings.wrong(
                    Invariant.CONTENTS, file["_id"], f"{self.collection} {file['_id']}",
                    "its bytes as they were written", f"sha256 {expected}…", f"sha256 {actual.hexdigest()}",
                )  # fmt: skip


class StrayFiles(Whole):
    """Names the GridFS files that no document names, and the documents whose files are gone."""

    async def inspect(self, moment: Snapshot, findings: Findings) -> None:
        for owner in PACKED:
            files = {file["_id"] for file in await moment.find(f"{owner}.packed.files", {}, {"_id": 1})}
            named: dict[str, str] = {}
            async for moved in moment.each(owner, {MARK: {"$exists": True}}, {MARK: 1}):
                named |= dict.fromkeys(moved_fields(moved), f"{owner} {moved['_id']}")
            for file, document in named.items():
                if file not in files and not await _is_quarantined(moment, owner, file):
                    findings.wrong(Invariant.CONTENTS, None, document, "its file in GridFS", file, "none")
            chunks = await moment.aggregate(f"{owner}.packed.chunks", [{"$group": {"_id": "$files_id"}}])
            stray = sorted(map(str, {*files, *(chunk["_id"] for chunk in chunks)} - named.keys()))
            if stray:
                findings.note(
                    f"{owner}: {len(stray)} files in GridFS belong to no document: {stray[0]}"
                    f"{', …' if stray[1:] else ''}: a writer ended before its document, or somebody deleted"
                    " it"
                )


async def _is_quarantined(moment: Snapshot, owner: str, file_id: str) -> bool:
    """Return whether a file's datum is quarantined, which names what is wrong with it."""
    datum = {"_id": file_id.rsplit("/", 2)[0], "status": DataStatus.QUARANTINED.value}
    return owner == DATA and bool(await moment.find(DATA, datum, {"_id": 1}))
