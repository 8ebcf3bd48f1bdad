"""The groups that became complete by a write of this process: it finalizes them, and others need not look."""

from __future__ import annotations

from collections import defaultdict

from agentrl.documents.status import TaskStatus


class CompletedGroups:
    """Collects groups whose last slot a call of this process scored or failed, until they are taken."""

    def __init__(self) -> None:
        self._waiting: defaultdict[str, set[str]] = defaultdict(set)

    def note(self, split: str, task_id: str, status: TaskStatus) -> None:
        """Keep the group if a write of this process left it WAITING."""
        if status is TaskStatus.WAITING:
            self._waiting[split].add(task_id)

    def take(self, split: str) -> list[str]:
        """The ids of the groups of ``split`` that were noted since the last call."""
        return sorted(self._waiting.pop(split, ()))
