"""The functions that tasks may name as ``module:function``, as users who may write ``Run`` loaded them."""

from __future__ import annotations

from collections.abc import Collection

from pymongo.errors import OperationFailure

from agentrl.documents.run import IMPORTS
from agentrl.store.connection import Part, database_call
from agentrl.store.names import RUN

_NOT_ALLOWED = 13


class Imports(Part):
    """The list of paths in ``Run``. Samplers read it, and on a server with authentication cannot write it."""

    @database_call
    async def paths(self) -> frozenset[str]:
        """Return the paths that may be imported."""
        document = await self._collection(RUN).find_one({"_id": IMPORTS})
        return frozenset(() if document is None else document.get("paths", ()))

    @database_call
    async def add(self, paths: Collection[str]) -> bool:
        """Add paths; False where this user may not write ``Run``."""
        if not paths or frozenset(paths) <= await self.paths():
            return True
        try:
            await self._collection(RUN).update_one(
                {"_id": IMPORTS}, {"$addToSet": {"paths": {"$each": sorted(paths)}}}, upsert=True
            )
        except OperationFailure as error:
            if error.code != _NOT_ALLOWED:
                raise
            return False
        return True
