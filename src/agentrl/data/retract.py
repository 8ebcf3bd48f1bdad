"""Delete what a retraction lists, decide its groups anew without it, and delete its images."""

from __future__ import annotations

from collections.abc import Callable

from agentrl.data.rescore import decide_by
from agentrl.documents.task import Task
from agentrl.store.admin.retract import Retractions
from agentrl.store.admin.withdraw import Withdrawing
from agentrl.store.groups import Decide
from agentrl.store.mechanics.connection import Connection


def decide_stored(task: Task) -> Decide | None:
    """Return the function that decides a finalized group by the rules that it stores; None without any."""
    return decide_by(task)((task.group or {}).get("rules"))


async def delete_withdrawn(
    connection: Connection,
    *,
    attempt: int | None = None,
    is_sampled: bool = False,
    on_group: Callable[[int], None] = lambda count: None,
) -> int:
    """Delete everything that tombstones list, and finish the retractions; return how many images must wait.

    A call that is killed is finished by the next. ``attempt`` is that of the trainer's lease, which the
    caller holds; ``on_group`` is called with 1 after each group. Raises ConfigError or GroupError, with what
    went before done, if a group's rules name code of the user that this process may not import.
    """
    withdrawing = Withdrawing(connection)
    await withdrawing.list_late_copies()
    while pending := await withdrawing.pending():
        for task in pending:
            await withdrawing.withdraw(task, decide_stored, attempt)
            on_group(1)
        await withdrawing.list_late_copies()
    for task in await withdrawing.kept_as_trained():
        await withdrawing.decide_again(task, decide_stored, attempt)
    await withdrawing.rewrite_steps(attempt)
    await withdrawing.sweep()
    return await finish_withdrawn(connection, is_sampled=is_sampled)


async def finish_withdrawn(connection: Connection, *, is_sampled: bool) -> int:
    """Delete images that are left, and finish retractions with nothing more to do; return how many wait."""
    retractions, withdrawing = Retractions(connection), Withdrawing(connection)
    waiting = 0
    for retraction in await retractions.unfinished():
        left = await withdrawing.delete_images(retraction, is_sampled=is_sampled)
        waiting += left
        is_rebuilt = retraction.rebuilt is not None or not retraction.rebuilds
        if not left and is_rebuilt and not retraction.family:
            await retractions.finish(retraction)
    return waiting
