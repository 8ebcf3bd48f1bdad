"""Offer some tools of a server and hide the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.tools.base import Reply, Schema, ServerSession, ToolServer, Trajectory, schema_name


class SelectedTools:
    """A tool server of which only the tools ``names`` are offered."""

    def __init__(self, server: ToolServer, names: frozenset[str]) -> None:
        self.name = server.name
        self._server = server
        self._names = names

    @property
    def schemas(self) -> Sequence[Schema]:
        """Return the schemas of the selected tools."""
        return _selected(self._server.schemas, self._names)

    async def open(self) -> None:
        """Connect."""
        await self._server.open()

    def session(self, trajectory: Trajectory) -> SelectedSession:
        """Return a session of the server."""
        return SelectedSession(self._server.session(trajectory), self._names)

    async def close(self) -> None:
        """Disconnect."""
        await self._server.close()


class SelectedSession:
    """A session of which only the tools ``names`` are offered."""

    def __init__(self, session: ServerSession, names: frozenset[str]) -> None:
        self._session = session
        self._names = names

    async def open(self) -> None:
        """Prepare the trajectory's state."""
        await self._session.open()

    async def list(self) -> Sequence[Schema]:
        """Return the schemas of the selected tools."""
        return _selected(await self._session.list(), self._names)

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Reply:
        """Call one tool."""
        return await self._session.call(tool, arguments)

    async def close(self) -> None:
        """Release the trajectory's state."""
        await self._session.close()


def _selected(schemas: Sequence[Schema], names: frozenset[str]) -> Sequence[Schema]:
    return [schema for schema in schemas if schema_name(schema) in names]
