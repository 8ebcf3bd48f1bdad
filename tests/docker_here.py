"""Say whether tests can run containers here."""

from __future__ import annotations

import os
import subprocess

IMAGE = os.environ.get("AGENTRL_TEST_IMAGE", "")
"""An image with ``/usr/bin/python3``, such as Debian with the package python3."""


def docker_problem() -> str | None:
    """Return why no container can run here; None if one can."""
    if not IMAGE:
        return "AGENTRL_TEST_IMAGE names no image"
    command = ["docker", "image", "inspect", IMAGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no Docker: {error}"
    return done.stderr.strip() if done.returncode else None
