"""MongoDB releases that AgentRL works with, and when their support ends."""

from __future__ import annotations

from datetime import date
from typing import Final

END_OF_LIFE: Final = {6: date(2025, 7, 31), 7: date(2027, 8, 31), 8: date(2029, 10, 31)}
"""Major version → the last day of its support (mongodb.com/legal/support-policy/lifecycles)."""

RELEASES: Final = tuple((major, 0) for major in sorted(END_OF_LIFE))
"""The major releases in order. Data move from one to the next, and skip none."""

OLDEST_RELEASE: Final = RELEASES[0]
"""The oldest release that AgentRL works with."""


def support_ended_on(major: int, today: date) -> date | None:
    """Return the day on which the support of a major version ended; None if it has not."""
    end = END_OF_LIFE.get(major)
    return end if end is not None and end < today else None
