"""Read and extend the list of ``module:function`` paths that tasks may name and samplers may import."""

from __future__ import annotations

from collections.abc import Collection

from pymongo.errors import OperationFailure

from agentrl.documents.run import ImportList
from agentrl.store.connection import Repository, database_call
from agentrl.store.names import IMPORTS

_NOT_ALLOWED = 13


class Imports(Repository):
    """The calls on the list. On a server with authentication samplers may only read it."""

    @database_call
    async def paths(self) -> frozenset[str]:
        """Return the paths that may be imported."""
        document = await self._collection(IMPORTS).find_one({"_id": ImportList().id})
        return frozenset(() if document is None else ImportList.from_document(document).paths)

    @database_call
    async def add(self, paths: Collection[str]) -> bool:
        """Add paths; return False if the database user may not."""
        if not paths or frozenset(paths) <= await self.paths():
            return True
        try:
            await self._collection(IMPORTS).update_one(
                {"_id": ImportList().id}, {"$addToSet": {"paths": {"$each": sorted(paths)}}}, upsert=True
            )
        except OperationFailure as error:
            if error.code != _NOT_ALLOWED:
                raise
            return False
        return True
