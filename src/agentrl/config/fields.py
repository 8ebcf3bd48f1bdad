"""What configuration dataclasses are made of: a field with its help, and the checks of values."""

from __future__ import annotations

import math
from dataclasses import field
from typing import Any

from agentrl.errors import ConfigError


def flag(default: Any, help: str, *, repr: bool = True, **metadata: Any) -> Any:
    """A dataclass field with a default and the line that ``--help`` prints. ``repr`` False: a secret."""
    return field(default=default, repr=repr, metadata={"help": help, **metadata})


def require(condition: bool, message: str, hint: str) -> None:
    """ConfigError unless ``condition``."""
    if not condition:
        raise ConfigError(message, hint=hint)


def require_positive(owner: object, *names: str) -> None:
    """ConfigError for a named field that is neither None nor finite and above 0."""
    for name in names:
        value = getattr(owner, name)
        require(
            value is None or (math.isfinite(value) and value > 0),
            f"--{name} is {value}",
            f"give --{name} a value above 0",
        )
