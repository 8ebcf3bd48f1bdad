"""Find the image of a harness in Docker, before anything is claimed."""

from __future__ import annotations

import subprocess
from typing import Final

from agentrl.errors import ConfigError

_LOOK_SECONDS: Final = 30.0
_PULL_SECONDS: Final = 1800.0


def require_image(image: str, where: str) -> None:
    """Pull an image that this machine does not have. Raises ConfigError if there is no Docker or no image."""
    if _docker(where, ["version", "--format", "{{.Server.Version}}"], _LOOK_SECONDS) is not None:
        raise ConfigError(
            f"{where}: isolation is 'docker', and no Docker daemon answers",
            hint="start it, let this user reach it, or use isolation: auto",
        )
    if _docker(where, ["image", "inspect", image], _LOOK_SECONDS) is None:
        return
    problem = _docker(where, ["pull", "--quiet", image], _PULL_SECONDS)
    if problem is not None:
        raise ConfigError(
            f"{where}: the image {image!r} cannot be pulled: {problem}", hint=f"try `docker pull {image}`"
        )


def _docker(where: str, words: list[str], seconds: float) -> str | None:
    """Run a command of Docker; return what it says if it fails. Raises ConfigError without Docker."""
    try:
        done = subprocess.run(
            ["docker", *words], capture_output=True, text=True, timeout=seconds, check=False
        )
    except FileNotFoundError as error:
        raise ConfigError(
            f"{where}: isolation is 'docker', and there is no command 'docker'",
            hint="install Docker, or use isolation: auto",
        ) from error
    except subprocess.TimeoutExpired:
        return f"no answer within {seconds:g} s"
    return None if done.returncode == 0 else done.stderr.strip()[-500:] or f"exit code {done.returncode}"
