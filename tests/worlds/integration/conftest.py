"""What tests of containers share."""

from __future__ import annotations

from pathlib import Path

import pytest
from rootfs_here import make_rootfs


@pytest.fixture(scope="session")
def rootfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a root file system. Containers write to overlays of their own."""
    return make_rootfs(tmp_path_factory.mktemp("rootfs") / "root")
