"""One trajectory: write state into every server that keeps some, misbehave, and read back only its own."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.errors import ToolServerError
from agentrl.tools.pool import ToolPool
from agentrl.tools.tool import ToolSession, TrajectoryInfo

_MISBEHAVIOURS = ("die", "hang", "garbage", "huge", "noise", "change_tools")


@dataclass
class Report:
    """What all trajectories saw."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Tool → the time of each call."""
    errors: dict[str, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    def require(self, holds: bool, what: str) -> None:
        """Note a violation unless ``holds``."""
        if not holds:
            self.violations.append(what)


class Run:
    """One trajectory's calls and checks."""

    def __init__(self, number: int, tools: ToolSession, report: Report, folder: Path) -> None:
        self.mark = f"secret-of-{number}"
        self.number = number
        self.tools = tools
        self.report = report
        self.folder = folder

    async def call(self, tool: str, *, may_fail: bool = False, **arguments: Any) -> str:
        """Call a tool; an error is a violation unless it ``may_fail``."""
        result = await self.tools.call(tool, arguments)
        name = f"{result.server}.{tool}"
        self.report.seconds.setdefault(name, []).append(result.seconds)
        if result.error:
            self.report.errors[name] = self.report.errors.get(name, 0) + 1
        self.report.require(may_fail or not result.error, f"{self.number}: {name}: {result.text[:200]}")
        return result.text

    def own(self, where: str, text: str) -> None:
        """Require that ``text`` has this trajectory's mark and no other one."""
        others = text.replace(f"{self.mark}.", "").count("secret-of-")
        self.report.require(f"{self.mark}." in text and others == 0, f"{self.number}: {where}: {text[:200]}")

    async def all(self) -> None:
        """Run every part; the stateful servers in parallel, as the calls of one turn."""
        await asyncio.gather(self.files(), self.memory(), self.sqlite(), self.shared())
        await asyncio.gather(self.misbehave(), self.refused())

    async def files(self) -> None:
        """Write a file in the private folder; see no other."""
        folder = (await self.call("list_allowed_directories")).splitlines()[1]
        await self.call("write_file", path=f"{folder}/mine.txt", content=f"{self.mark}.")
        listed = await self.call("list_directory", path=folder)
        self.report.require(listed.count("[FILE]") == 1, f"{self.number}: files: {listed[:200]}")
        self.own("files", await self.call("read_text_file", path=f"{folder}/mine.txt"))

    async def memory(self) -> None:
        """Remember one entity; remember no other."""
        entity = {"name": f"{self.mark}.", "entityType": "note", "observations": ["kept"]}
        await self.call("create_entities", entities=[entity])
        self.own("memory", await self.call("read_graph"))

    async def sqlite(self) -> None:
        """Insert one row; find no other."""
        await self.call("create_table", query="CREATE TABLE notes (text TEXT)")
        await self.call("write_query", query=f"INSERT INTO notes VALUES ('{self.mark}.')")
        self.own("sqlite", await self.call("read_query", query="SELECT * FROM notes"))

    async def shared(self) -> None:
        """Call the shared servers; each answer is the caller's own."""
        self.own("echo", await self.call("echo", message=f"{self.mark}."))
        total = await self.call("get-sum", a=self.number, b=1)
        self.report.require(str(self.number + 1) in total, f"{self.number}: get-sum: {total[:200]}")
        await self.call("get_current_time", timezone="Europe/Berlin")
        await self.call("get-tiny-image")
        await self.call("list_resources")
        meta = json.loads(await self.call("web.meta"))
        self.report.require(meta.get("agentrl/trajectory") == f"train/0/t/{self.number}", f"meta: {meta}")

    async def misbehave(self) -> None:
        """Have the own process misbehave; the state is then this trajectory's, or gone."""
        await self.call("append", text=f"{self.mark}.")
        kind = _MISBEHAVIOURS[self.number % len(_MISBEHAVIOURS)]
        arguments = {"megabytes": 50} if kind == "huge" else {}
        said = await self.call("misbehaving.huge" if kind == "huge" else kind, may_fail=True, **arguments)
        state = await self.call("misbehaving.read")
        if "its earlier state is lost" in said and kind not in ("die", "garbage"):
            self.report.require("secret-of-" not in state, f"{self.number}: {kind}: {state[:200]}")
        elif kind in ("die", "garbage"):
            self.report.require("may have taken effect" in said, f"{self.number}: {kind}: {said[:200]}")
            self.report.require("secret-of-" not in state, f"{self.number}: {kind}: {state[:200]}")
        else:
            self.own(kind, state)

    async def refused(self) -> None:
        """Call the server that is overloaded, and the one that answers garbage."""
        try:
            await self.call("busy.read")
            self.report.violations.append(f"{self.number}: an overloaded server is no outage")
        except ToolServerError as error:
            self.report.require(error.outage is not None, f"{self.number}: {error}")
        said = await self.call("garbled.pid", may_fail=True)
        self.report.require("Failed to parse" in said, f"{self.number}: garbage: {said[:200]}")


async def run(number: int, pool: ToolPool, report: Report, folder: Path) -> None:
    """Run one trajectory; an exception is a violation."""
    try:
        async with pool.session(TrajectoryInfo(id=f"train/0/t/{number}")) as tools:
            await Run(number, tools, report, folder).all()
    except Exception as error:  # noqa: BLE001  whatever it is, it belongs into the report
        report.violations.append(f"{number}: {type(error).__name__}: {error}")
