"""Skip tests of environments whose packages are not installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

MISSING = [name for name in ("reasoning_gym", "textarena") if find_spec(name) is None]

needs_packages = pytest.mark.skipif(
    bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (pip install -e '.[environments]')"
)
