"""``agentrl samplers``: list the samplers of a run, and drain some of them.

A sampler that drains claims nothing more, lets its running calls end for ``--drain_seconds``, releases what
it holds, and ends with exit code 0. Any other sampler goes on with what it released.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from agentrl.base.processes import user_name
from agentrl.config.flags import Flags
from agentrl.config.load import Configs, leading_words, parse
from agentrl.config.schema import JsonFlags, RunConfig, flag
from agentrl.errors import AgentRLError, ConfigError, did_you_mean

if TYPE_CHECKING:
    from agentrl.store.client import Store
    from agentrl.store.services import ListedSampler

_ACTIONS = ("drain",)
_MOST_NAMES = 100
_NAMES_SHOWN = 20
_PATTERN = "*?["
_POLL_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class DrainFlags(Flags):
    """Whether to wait."""

    wait_seconds: float = flag(
        0.0,
        "how long to wait until the samplers have ended (default: ask, and do not wait)",
        within="[0, inf)",
        unit="seconds",
    )


def main(argv: list[str]) -> int:
    """List the samplers of a run, or run ``agentrl samplers drain NAME …``."""
    words = leading_words(argv, 1 + _MOST_NAMES)
    if not words:
        configs = parse(
            argv,
            command="agentrl samplers",
            needs_run=True,
            description="Lists the samplers of a run: name, host, process id, state, claims, start."
            " `agentrl samplers drain NAME …` lets some of them end.",
            shown=[RunConfig],
            extra=[JsonFlags],
        )
        asyncio.run(_list(configs))
        return 0
    if words[0] not in _ACTIONS:
        raise ConfigError(
            f"agentrl samplers has no action {words[0]!r}", hint=did_you_mean(words[0], _ACTIONS)
        )
    names = words[1:]
    configs = parse(
        argv[len(words) :],
        command="agentrl samplers drain NAME …",
        needs_run=True,
        description="Asks samplers to drain: they let running calls end, release what they hold, and end."
        " NAME is a sampler's name or its beginning, the name of a host, or a pattern such as 'node7-*'.",
        shown=[RunConfig],
        extra=[DrainFlags],
    )
    if not names:
        raise ConfigError(
            "agentrl samplers drain takes the names of samplers",
            hint="`agentrl samplers --run_name RUN` lists them",
        )
    asyncio.run(_drain(configs, names))
    return 0


async def _list(configs: Configs) -> None:
    from agentrl.observe.terminal import age, print_json, stdout_console, table_of, to_json
    from agentrl.store.client import open_existing

    async with await open_existing(configs[RunConfig]) as store:
        samplers = await store.samplers.all()
        at = await store.connection.server_time()
    if configs[JsonFlags].json:
        print_json([
            {
                **to_json(each.process), "name": each.process.id, "state": each.state, "claims": each.claims,
                "silent_seconds": each.silent_seconds,
            }
            for each in samplers
        ])  # fmt: skip
    elif not samplers:
        print(f"no sampler of run {configs[RunConfig].run_name} is running")
    else:
        stdout_console().print(
            table_of(
                f"{len(samplers)} samplers of run {configs[RunConfig].run_name}", samplers,
                ("name", lambda row: row.process.id),
                ("host", lambda row: row.process.host),
                ("pid", lambda row: row.process.pid),
                ("state", lambda row: row.state),
                ("claims", lambda row: row.claims),
                ("since", lambda row: age(row.process.started_at, at)),
                ("heard", lambda row: f"{row.silent_seconds:.0f} s ago"),
                text=2,
            )
        )  # fmt: skip


async def _drain(configs: Configs, names: Sequence[str]) -> None:
    from agentrl.store.client import open_existing

    async with await open_existing(configs[RunConfig]) as store:
        chosen = chosen_samplers(names, await store.samplers.all())
        by = f"{user_name()} on {socket.gethostname()}"
        for each in chosen:
            if await store.samplers.ask_to_drain(each.process.id, by):
                print(f"{each.process.id} drains: it releases its {each.claims} claims and ends")
            else:
                print(f"{each.process.id} has just ended")
        if seconds := configs[DrainFlags].wait_seconds:
            await _wait_for_ends(store, {each.process.id for each in chosen}, seconds)


async def _wait_for_ends(store: Store, names: Collection[str], seconds: float) -> None:
    """Wait until the samplers have ended. Raises AgentRLError for those that die, or take too long."""
    deadline = time.monotonic() + seconds
    while left := [each for each in await store.samplers.all() if each.process.id in names]:
        if dead := [each.process.id for each in left if not each.is_alive]:
            raise AgentRLError(
                f"{', '.join(dead)} died while draining",
                hint="the leases of its claims run out by themselves",
            )
        if time.monotonic() >= deadline:
            raise AgentRLError(
                f"{', '.join(each.process.id for each in left)} still drains after {seconds:g} s",
                hint="its --drain_seconds bounds the time for running calls; give --wait_seconds 20 s more",
            )
        await asyncio.sleep(_POLL_SECONDS)
    print("ended")


def chosen_samplers(names: Sequence[str], samplers: Sequence[ListedSampler]) -> list[ListedSampler]:
    """Return the live samplers that ``names`` choose.

    Raises ConfigError for a name that none has, that begins the names of several, or whose samplers are dead.
    """
    chosen = {}
    for name in names:
        found = _matching(name, samplers)
        if not found:
            known = ", ".join(each.process.id for each in samplers[:_NAMES_SHOWN]) or "none"
            more = ", …" if len(samplers) > _NAMES_SHOWN else ""
            raise ConfigError(f"no sampler is named {name!r}", hint=f"samplers of this run: {known}{more}")
        if not any(each.is_alive for each in found):
            dead = ", ".join(each.process.id for each in found)
            silent = min(each.silent_seconds for each in found)
            raise ConfigError(
                f"{dead} is dead: its last heartbeat was {silent:.0f} s ago",
                hint="there is nothing to drain: the leases of its claims run out, and other samplers go on",
            )
        chosen.update({each.process.id: each for each in found if each.is_alive})
    return list(chosen.values())


def _matching(name: str, samplers: Sequence[ListedSampler]) -> list[ListedSampler]:
    """Return the samplers of this name, host or pattern; else the one whose name begins so."""
    exact = [each for each in samplers if name in (each.process.id, each.process.host)]
    if exact or any(mark in name for mark in _PATTERN):
        return exact or [each for each in samplers if fnmatchcase(each.process.id, name)]
    found = [each for each in samplers if each.process.id.startswith(name)]
    if len(found) > 1:
        # Why not all of them? "node1" also begins the names of the samplers of node10.
        shown = ", ".join(each.process.id for each in found[:_NAMES_SHOWN])
        raise ConfigError(
            f"{name!r} begins the names of {len(found)} samplers: {shown}",
            hint=f"give more of the name, or the pattern '{name}*' for all of them",
        )
    return found
