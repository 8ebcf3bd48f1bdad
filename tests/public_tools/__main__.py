"""Run the trajectories and print each tool's calls, errors and latencies; the last line counts violations."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

import yaml

from agentrl.config.schema import ToolConfig
from agentrl.tools.pool import ToolPool
from public_tools.servers import misbehaving_servers, misbehaving_web, public_servers
from public_tools.trajectory import Report, run

_LIMIT_SECONDS = 900.0


async def run_all(trajectories: int, file: Path) -> Report:
    """Run that many trajectories at once."""
    report = Report()
    config = ToolConfig(mcp_servers_file=str(file), tool_timeout_seconds=300)
    async with asyncio.timeout(_LIMIT_SECONDS), ToolPool(config) as pool:
        await asyncio.gather(*(run(number, pool, report, file.parent) for number in range(trajectories)))
    return report


def show(report: Report) -> None:
    """Print one line for each tool."""
    print(f"{'tool':38} {'calls':>6} {'errors':>6} {'p50 s':>8} {'max s':>8}")
    for tool, seconds in sorted(report.seconds.items()):
        errors = report.errors.get(tool, 0)
        print(f"{tool:38} {len(seconds):6} {errors:6} {statistics.median(seconds):8.3f} {max(seconds):8.3f}")


def main() -> int:
    """Return 0 if no state crossed trajectories and every misbehaviour ended in a named state."""
    parser = argparse.ArgumentParser(prog="scripts/test_tools.sh")
    parser.add_argument("--trajectories", type=int, default=64, help="trajectories at once")
    trajectories = parser.parse_args().trajectories
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="agentrl-tools-") as folder, misbehaving_web() as port:
        file = Path(folder) / "servers.yml"
        file.write_text(yaml.safe_dump({"servers": {**public_servers(), **misbehaving_servers(port)}}))
        report = asyncio.run(run_all(trajectories, file))
    show(report)
    for violation in report.violations:
        print(f"violation: {violation}")
    calls = sum(map(len, report.seconds.values()))
    print(f"{trajectories} trajectories at once, {calls} calls, {time.monotonic() - began:.0f} s")
    print(f"{len(report.violations)} violations")
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
