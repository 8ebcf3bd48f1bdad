"""What belongs to a transaction: the calls of its block, and nothing outside of it."""

from __future__ import annotations

import asyncio

import pytest

from agentrl.documents.run import ImportList
from agentrl.store.client import Store
from agentrl.store.mechanics.connection import IMPORTS, abort, use_session

pytestmark = pytest.mark.integration

LIST = ImportList(paths=("a:b",)).to_document()


async def test_calls_belong_to_the_transaction_around_them(store: Store) -> None:
    lists = store.connection.collection(IMPORTS)  # made before the transaction

    async def count_outside() -> int:
        with use_session(None):
            return await lists.count_documents({})

    async def write() -> None:
        await lists.insert_one(LIST)
        outside, inside = await asyncio.gather(count_outside(), lists.count_documents({}))
        assert (outside, inside) == (0, 1)

    await store.connection.transaction(write)
    assert await lists.count_documents({}) == 1


async def test_an_error_and_an_abort_undo_the_calls(store: Store) -> None:
    lists = store.connection.collection(IMPORTS)

    async def fail() -> None:
        await lists.insert_one(LIST)
        raise KeyError

    async def give_up() -> int:
        await lists.insert_one(LIST)
        await abort()
        return await lists.count_documents({})

    with pytest.raises(KeyError):
        await store.connection.transaction(fail)
    assert await store.connection.transaction(give_up) == 0
    assert await lists.count_documents({}) == 0
