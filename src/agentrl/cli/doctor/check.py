"""Define the result of one check of ``agentrl doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One row of the table. ``hint`` says how to fix it and is empty if ``state`` is ok."""

    name: str
    state: State
    found: str
    hint: str = ""
