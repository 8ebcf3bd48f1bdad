"""The log of outages of the database."""

from __future__ import annotations

import time

from agentrl.store.mechanics.retry import OutageLog


def test_a_call_that_fails_after_the_outage_in_which_it_began_belongs_to_that_outage() -> None:
    log = OutageLog()
    called_at = time.monotonic()
    log.call_failed("gone", 1.0, called_at)
    log.call_succeeded()
    log.call_failed("gone", 1.0, called_at)
    assert log.seconds_since > 0
    log.call_succeeded()
    assert len(log.take_past()) == 1
    log.call_failed("gone again", 1.0, time.monotonic())
    assert log.seconds_since == 0
    log.call_succeeded()
    assert [past.why for past in log.take_past()] == ["gone again"]
