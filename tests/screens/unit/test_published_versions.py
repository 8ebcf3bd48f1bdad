"""What people read of the newest versions: their bytes, and the seconds until engines served them."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from snapshots import NOW, engine, printed, snapshot, step_row

from agentrl.documents.run import FileChecksum, LiveWeights, PolicyVersion, ServedVersion
from agentrl.documents.status import VersionStatus
from agentrl.screens.run_screens import render_run_status
from agentrl.screens.snapshot import published_versions

FILES = (FileChecksum(name="delta.safetensors", bytes=3 << 20, sha256="0"),)
VERSIONS = [
    PolicyVersion(id=number, step=step, location="/w", files=FILES, encoding=encoding, train_step=None,
                  published_at=NOW, status=status)
    for number, step, encoding, status in (
        (2, 9, "delta", VersionStatus.PUBLISHED), (1, 8, "full", VersionStatus.WITHDRAWN),
        (0, 0, "full", VersionStatus.PUBLISHED),
    )
]  # fmt: skip


def test_a_version_has_its_bytes_and_the_seconds_until_the_last_engine_served_it() -> None:
    engines = [
        replace(engine(), served=tuple(ServedVersion(version=2, at=NOW + timedelta(seconds=s)) for s in at))
        for at in ((1.5,), (), (-3.0,), (0.5,))
    ]
    steps = [step_row(9), step_row(10, metrics={"seconds_publish": 0.25})]
    newest, base = published_versions(VERSIONS, steps, engines)
    assert (newest.version, newest.step, newest.encoding, newest.bytes) == (2, 9, "delta", 3 << 20)
    assert (newest.seconds_waited, newest.engines, newest.seconds_until_served) == (0.25, 3, 1.5)
    assert (base.version, base.seconds_waited, base.engines, base.seconds_until_served) == (0, None, 0, None)
    live = LiveWeights(kind="tensor", shares=())
    [row] = published_versions([replace(VERSIONS[0], files=(), live=live, encoding="full")], steps, [])
    assert (row.encoding, row.bytes) == ("tensor", 0)
    page = printed(render_run_status(snapshot(versions=[newest, base])))
    assert "weights    version 2 delta, 3.0 MiB, trainer waited 0.2 s, served by 3 after 1.5 s" in page
