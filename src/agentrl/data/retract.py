"""Take what a retraction lists out of a run, and out of folders that ``agentrl db export`` wrote."""

from __future__ import annotations

import glob
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from agentrl.config.schema import RunConfig
from agentrl.data.finalize_group import decide_stored
from agentrl.documents.retraction import Tombstone
from agentrl.errors import StoreError
from agentrl.store.admin.archive import MANIFEST, verify
from agentrl.store.admin.dataset import FILE, require_pyarrow
from agentrl.store.admin.retract import Retractions, Selection
from agentrl.store.admin.transfer import Transfer, withdrawn_in
from agentrl.store.admin.withdraw import Withdrawing
from agentrl.store.client import open_connection
from agentrl.store.mechanics.connection import Connection

_ROWS = re.compile(r"^[\d,]+(?= scored trajectories)", re.MULTILINE)
_NEW, _OLD = ".retracted-", ".original-"


async def delete_withdrawn(
    connection: Connection,
    *,
    attempt: int | None = None,
    on_group: Callable[[int], None] = lambda count: None,
) -> None:
    """Delete everything that tombstones list except images; call ``finish_withdrawn`` afterwards.

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
    await Retractions(connection).set_deleted()


async def finish_withdrawn(connection: Connection, *, is_sampled: bool) -> int:
    """Delete images that are left, and finish retractions with nothing more to do; return how many wait."""
    retractions, withdrawing = Retractions(connection), Withdrawing(connection)
    waiting = 0
    for retraction in await retractions.unfinished():
        left = await withdrawing.delete_images(retraction, is_sampled=is_sampled)
        waiting += left
        is_rebuilt = retraction.rebuilt is not None or not retraction.rebuilds
        if not left and is_rebuilt and not retraction.family and not retraction.archives:
            await retractions.finish(retraction)
    return waiting


def find_exports(path: str) -> list[Path]:
    """Return ``path`` if it is an export, else the exports below it. Raises StoreError if there are none.

    An export whose replacement was interrupted is named as if it were whole; nothing is changed.
    """
    folder = Path(path).resolve()
    beside = folder.parent.glob(f"{_NEW}{glob.escape(folder.name)}")
    names = {_final(found) for found in (*beside, *folder.rglob(f"{_NEW}*")) if _is_export(found)}
    archives = {found.parent for found in folder.rglob(MANIFEST)}
    tables = {found.parent.parent for found in folder.rglob(FILE)}
    names |= {_final(found) for found in archives | tables if _is_export(found)}
    if not names:
        raise StoreError(f"{folder} holds no export", hint=f"an export has {MANIFEST} or {FILE}")
    return sorted(names)


def _is_export(folder: Path) -> bool:
    is_archive = (folder / MANIFEST).is_file() and any(folder.glob("*.jsonl"))
    return is_archive or (folder / FILE).is_file()


def _final(folder: Path) -> Path:
    """Return the place of an export that is being replaced: of its new folder, and of its old one."""
    return folder.with_name(folder.name.removeprefix(_NEW).removeprefix(_OLD))


def finish_replacement(folder: Path) -> None:
    """Finish the replacement of the export ``folder`` that was interrupted, if it was. Raises StoreError.

    Only folders that are exports are moved or deleted: others may have such a name too.
    """
    new, old = (folder.with_name(f"{prefix}{folder.name}") for prefix in (_NEW, _OLD))
    if _is_export(new):
        _replace(new, folder)
    elif _is_export(old) and _is_export(folder):
        shutil.rmtree(old)


async def withdraw_from(
    run: RunConfig, folder: Path, stones: Mapping[str, Tombstone], *, because: str, by: str
) -> int:
    """Write an export anew without what ``stones`` stand for; return how many Records and Tasks it held.

    An archive is imported into a database of its own, withdrawn from there as from the run, and exported
    again: its groups are decided again, and it holds the tombstones. Raises StoreError for a folder that is
    damaged or cannot be written.
    """
    if (folder / FILE).is_file():
        return _filter_dataset(folder, stones)
    created = {key: stone.created_at for key, stone in stones.items()}
    held = withdrawn_in(folder, verify(folder), created)
    if not held:
        return 0
    scratch = replace(run, run_name=f"retract_{secrets.token_hex(6)}")
    connection = await open_connection(scratch)
    new = folder.with_name(f"{_NEW}{folder.name}")
    try:
        await Transfer(connection).load(folder, allow_modules=True, withdrawn=True)
        again = [replace(stones[key], deleted_at=None) for key in sorted(held)]
        chosen = Selection(tombstones=again, first_step=None, versions=())
        await Retractions(connection).begin(chosen, because, by, rebuilds=False)
        await delete_withdrawn(connection)
        await finish_withdrawn(connection, is_sampled=False)
        await Transfer(connection).export(new)
    finally:
        await connection.client.drop_database(scratch.run_name)
        await connection.close()
    _replace(new, folder)
    return len(held)


def _replace(new: Path, folder: Path) -> None:
    """Put ``new`` in the place of ``folder``; ``finish_replacement`` goes on after an interruption."""
    old = folder.with_name(f"{_OLD}{folder.name}")
    try:
        if folder.exists() and not old.exists():
            folder.rename(old)
        new.rename(folder)
        shutil.rmtree(old)
    except OSError as error:
        raise StoreError(
            f"{folder} cannot be replaced: {error}", hint="call agentrl retract again"
        ) from error


def _filter_dataset(folder: Path, stones: Mapping[str, Tombstone]) -> int:
    require_pyarrow()
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(folder / FILE)
    ids, created = (table.column(name).to_pylist() for name in ("id", "created_at"))
    kept = [
        key not in stones or stones[key].created_at != at for key, at in zip(ids, created, strict=True)
    ]  # fmt: skip
    if all(kept):
        return 0
    partial = (folder / FILE).with_suffix(".partial")
    pyarrow.parquet.write_table(table.filter(kept), partial, compression="zstd")
    partial.replace(folder / FILE)
    readme = folder / "README.md"
    text = readme.read_text(encoding="utf-8")
    readme.write_text(_ROWS.sub(f"{sum(kept):,}", text), encoding="utf-8")
    return kept.count(False)
