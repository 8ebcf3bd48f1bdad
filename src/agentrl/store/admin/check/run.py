"""The whole check of a run: every section once, and what looks wrong a second time."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from agentrl.store.admin.check.data import Data
from agentrl.store.admin.check.epochs import Epochs
from agentrl.store.admin.check.findings import Findings, Report, Violation
from agentrl.store.admin.check.parents import CallParents, RecordParents
from agentrl.store.admin.check.reading import CheckOptions
from agentrl.store.admin.check.states import Legal
from agentrl.store.admin.check.steps import Lineage, StepData
from agentrl.store.admin.check.tasks import Tasks
from agentrl.store.admin.check.versions import Versions
from agentrl.store.connection import Connection, Repository, database_call
from agentrl.store.schema import VALIDATORS


class Checkable(Protocol):
    """A part of the check: ``scan`` reads all, ``look_again`` what has these keys."""

    async def scan(self, findings: Findings) -> None:
        """Check everything."""

    async def look_again(self, keys: Collection[Any], findings: Findings) -> None:
        """Check the documents of ``keys`` again."""


class Checks(Repository):
    """The check of one run: ``Checks(store.connection).run(options)``."""

    @database_call
    async def run(self, options: CheckOptions) -> Report:
        """Hold the run against its invariants, page by page, each page a snapshot of one moment.

        Others may write meanwhile. What looks wrong is looked at once more after ``settle_seconds``: a
        violation is what is wrong both times. Memory is bounded by a page and by the violations.
        """
        total = Findings()
        suspicions: list[tuple[Checkable, list[Violation]]] = []
        for section in _sections(self._connection, options):
            findings = Findings()
            await section.scan(findings)
            total.merge(findings)
            if findings.violations:
                suspicions.append((section, findings.violations))
        if suspicions:
            await asyncio.sleep(options.settle_seconds)
        confirmed: list[Violation] = []
        for section, seen in suspicions:
            again = Findings()
            await section.look_again({violation.key for violation in seen}, again)
            earlier = {violation.same_as() for violation in seen}
            confirmed += [violation for violation in again.violations if violation.same_as() in earlier]
        return Report(total.checked, tuple(confirmed), tuple(total.notes))


def _sections(connection: Connection, options: CheckOptions) -> Sequence[Checkable]:
    kinds = (Tasks, RecordParents, CallParents, Data, StepData, Lineage, Versions, Epochs)
    legal = [Legal(connection, options, collection=name) for name in VALIDATORS]
    return [*(kind(connection, options) for kind in kinds), *legal]
