"""``agentrl retract RUN``: withdraw trajectories and tasks after the fact, and train without them."""

from __future__ import annotations

import argparse
import asyncio
import socket
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.cli.runs import confirm
from agentrl.config.load import CommandParser, group_of
from agentrl.config.schema import ClaimConfig, EngineConfig, RunConfig, TaskConfig
from agentrl.observe.progress import progress
from agentrl.processes import user_name

if TYPE_CHECKING:
    from agentrl.documents.retraction import Retraction, Tombstone
    from agentrl.store.admin.retract import Selection
    from agentrl.store.client import Store
    from agentrl.train.rebuild import Influence

_SHOWN = 5


def main(argv: list[str]) -> int:
    """Withdraw, and print what and where it went."""
    arguments = parser().parse_args(argv)
    return asyncio.run(retract(group_of(RunConfig, arguments), arguments))


def parser() -> CommandParser:
    """Return the parser of ``agentrl retract``."""
    parser = CommandParser(
        prog="agentrl retract",
        description="Withdraws trajectories: deletes them everywhere in the run, says which steps and weights"
        " trained them, and leaves tombstones without content. Stop the trainer first. Without a selection it"
        " finishes a call that was killed.",
    )
    parser.add_argument("run_name", metavar="RUN", help="the run")
    parser.add_argument(
        "--scorer", action="append", default=[], help="what this scorer scored; may be repeated"
    )
    parser.add_argument(
        "--task", action="append", default=[],
        help="a task as a whole, in every epoch, with query and answer: its _id, or its id in the file; may"
        " be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--record", action="append", default=[],
        help="one trajectory, with all attempts at it; may be repeated",
    )  # fmt: skip
    parser.add_argument("--because", default="", help="why; it is kept, so name no content")
    parser.add_argument(
        "--rebuild", action="store_true",
        help="go back to the last checkpoint before the first step that trained any of it, and delete later"
        " weights; the next trainer trains these steps again without it",
    )  # fmt: skip
    parser.add_argument(
        "--archive", action="append", default=[], metavar="DIR",
        help="take it out of this export of the run too, or of those below this folder (agentrl db export,"
        " with and without --hf); may be repeated",
    )  # fmt: skip
    parser.add_argument("--family", action="store_true", help="withdraw it from the run's children too")
    parser.add_argument("--output_dir", help="the run's output folder (that of its trainer)")
    parser.add_argument("--dry_run", action="store_true", help="say what would go, change nothing")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_database()
    parser.add_flags(RunConfig, "log_dir")
    parser.add_flags(ClaimConfig, "lease_seconds")
    parser.add_flags(TaskConfig, "allowed_modules")
    return parser


async def retract(run: RunConfig, arguments: argparse.Namespace) -> int:
    """Show what would go, ask, delete it, and say what to do next; return the exit code."""
    from agentrl.data.retract import delete_withdrawn, find_exports, finish_withdrawn, withdraw_from
    from agentrl.registry import allow_imports
    from agentrl.store.admin.retract import Retractions
    from agentrl.store.client import open_existing, open_store
    from agentrl.store.views.runs import Runs
    from agentrl.train.lease import hold_lease
    from agentrl.train.rebuild import go_back, influence, require_possible

    exports = [folder for given in arguments.archive for folder in find_exports(given)]
    async with await open_existing(run):
        pass  # a misspelled run is not made
    async with await open_store(run) as store:
        allow_imports([*group_of(TaskConfig, arguments).allowed_names, *await store.imports.paths()])
        retractions = Retractions(store.connection)
        select = partial(
            retractions.select, scorers=arguments.scorer, tasks=arguments.task, records=arguments.record
        )
        selection = await select()
        unfinished, unrebuilt = await retractions.unfinished(), await retractions.unrebuilt()
        rebuilt = [item for item in unrebuilt if arguments.rebuild or item.rebuilds]
        roots = await _roots(store, arguments)
        steps = await retractions.tainted(rebuilt, selection.steps)
        found = await influence(store, steps, roots)
        rebuilds = arguments.rebuild or bool(rebuilt)
        of_family = [item.because for item in unfinished if item.family]
        family, because = arguments.family or bool(of_family), arguments.because or "".join(of_family[-1:])
        for line in _preview(selection, unfinished, found, rebuilds=rebuilds):
            print(line)
        if rebuilds:
            require_possible(found)
        if arguments.dry_run:
            return 0
        if not arguments.yes and not await asyncio.to_thread(confirm, f"this from run {run.run_name}"):
            print(f"{run.run_name} is unchanged")
            return 0
        by = f"{user_name()}@{socket.gethostname()}"
        ended = (await store.trainer_lease.read()).ended
        async with hold_lease(store, group_of(ClaimConfig, arguments).lease_seconds) as lease:
            lease.ended = None if rebuilds else ended
            last = await store.steps.last()  # a trainer that was killed may have left a plan
            await store.steps.revert_after(0 if last is None else last.step, attempt=lease.attempt)
            selection = await select()  # a trainer may have stepped since the preview
            if selection.tombstones:
                begun = await retractions.begin(
                    selection, because, by, rebuilds=arguments.rebuild, family=family
                )
                rebuilt += [begun] if begun.rebuilds else []
            if family:
                await retractions.plan_family(family=True)
            if rebuilt:
                await retractions.plan_rebuild(rebuilt)
                steps = await retractions.tainted(rebuilt)
                gone_back = await go_back(store, lease, await influence(store, steps, roots))
                await retractions.set_rebuilt(rebuilt, gone_back)
            holders = await Runs(store.connection).holders(run.run_name, EngineConfig().alive_seconds)
            is_sampled = any(holder.startswith("sampler ") for holder in holders)
            with progress(f"withdrawing from run {run.run_name}, groups") as work:
                waiting = await delete_withdrawn(
                    store.connection, attempt=lease.attempt, on_group=work.advance, is_sampled=is_sampled
                )
        gone = await retractions.withdrawn()
        if family:
            await _withdraw_from_children(run, store, list(gone.values()), arguments, because, by)
            await retractions.plan_family(family=False)
            waiting = await finish_withdrawn(store.connection, is_sampled=is_sampled)
        await _remove_log_lines(store, run, gone)
        for folder in exports:
            held = await withdraw_from(run, folder, gone, because=arguments.because, by=by)
            print(f"{folder}: {held:,} withdrawn documents are taken out")
    print(f"{run.run_name}: withdrawn; only tombstones are left: agentrl db check --run_name {run.run_name}")
    if waiting:
        print(
            f"{waiting} images were used within the last hour and stay until then: samplers of the run live;"
            f" finish it later: agentrl retract {run.run_name}"
        )
    steps_back = [gone_back.step] if rebuilt else [item.rebuilt.step for item in unfinished if item.rebuilt]
    if steps_back:
        print(
            f"the run is back at step {steps_back[-1]}: start its trainer again, with the same command; it"
            " repeats the later steps without what is withdrawn"
        )
    elif selection.first_step is not None:
        print(
            f"the weights from step {selection.first_step} on were trained with it:"
            f" agentrl retract {run.run_name} --rebuild trains them without"
        )
    return 1 if waiting else 0


async def _withdraw_from_children(
    run: RunConfig,
    store: Store,
    stones: Sequence[Tombstone],
    arguments: argparse.Namespace,
    because: str,
    by: str,
) -> None:
    """Withdraw what ``stones`` stand for from the children of the run, and from theirs."""
    from agentrl.data.retract import delete_withdrawn
    from agentrl.store.admin.retract import Retractions
    from agentrl.store.client import open_store
    from agentrl.train.lease import hold_lease

    for child in await store.ancestry.living_children():
        named = replace(run, run_name=child.run)
        seconds = group_of(ClaimConfig, arguments).lease_seconds
        async with await open_store(named) as other:
            ended = (await other.trainer_lease.read()).ended
            async with hold_lease(other, seconds) as lease:
                lease.ended = ended
                retractions = Retractions(other.connection)
                selection = await retractions.select_of_parent(stones, reads=child.kind == "whatif")
                if selection.tombstones:
                    await retractions.begin(selection, because, by)
                await delete_withdrawn(other.connection, attempt=lease.attempt)
            count = len(selection.tombstones)
            print(f"{child.run}, a {child.kind} of {store.run_name}: {count:,} withdrawn")
            await _remove_log_lines(other, named, [stone.id for stone in stones])
            await _withdraw_from_children(named, other, stones, arguments, because, by)


async def _remove_log_lines(store: Store, run: RunConfig, names: Collection[str]) -> None:
    """Remove the log records that name something withdrawn, where processes of the run wrote them."""
    from agentrl.observe.log_lines import remove_lines

    stored = [each.values.get("log_dir") for each in await store.settings.resolved()]
    for folder in sorted({run.log_dir, *(str(each) for each in stored if each)}):
        if lines := await asyncio.to_thread(remove_lines, Path(folder), run.run_name, names):
            print(f"{folder}: {lines:,} log records of {run.run_name} that named it are removed")


async def _roots(store: Store, arguments: argparse.Namespace) -> list[Path]:
    """Return the folders of checkpoints: those of the run's trainer, or --output_dir."""
    flags = {each.role: each.values for each in await store.settings.resolved()}.get("train", {})
    output = arguments.output_dir or flags.get("output_dir") or f"output/{store.run_name}"
    fallback = flags.get("fallback_output_dir")
    return [Path(output)] if not fallback else [Path(output), Path(fallback) / store.run_name]


def _preview(
    selection: Selection, unfinished: Sequence[Retraction], found: Influence, *, rebuilds: bool
) -> Iterator[str]:
    """Yield what would go, and where it went."""
    from agentrl.documents.retraction import Withdrawn

    for item in unfinished:
        yield f"unfinished: the retraction of {item.at:%Y-%m-%d %H:%M} UTC by {item.by}; it is finished first"
    records, tasks = selection.of(Withdrawn.RECORD), selection.of(Withdrawn.TASK)
    if not records and not tasks and not unfinished:
        yield "nothing is selected that was not withdrawn before"
    for what, stones in (("Records", records), ("Tasks", tasks)):
        if stones:
            yield f"{what:<12} {len(stones):,}: {_listed([stone.id for stone in stones])}"
    if selection.steps:
        yield f"steps        {len(selection.steps):,}: {_listed(selection.steps)}"
    for child in found.children:
        yield f"child        {child.run}, a {child.kind} of step {child.step}, has it in its weights"
    if found.first is None:
        yield "weights      no step in the weights trained any of it"
        return
    ids = [version.id for version in found.versions]
    yield (
        f"weights      from step {found.first} on: {len(found.checkpoints)} checkpoints"
        + (f", versions {min(ids)} to {max(ids)}" if ids else "")
        + (
            f"; --rebuild deletes them and goes back to step {found.step}"
            if not rebuilds
            else f"; they are deleted, and the run goes back to step {found.step}"
        )
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
