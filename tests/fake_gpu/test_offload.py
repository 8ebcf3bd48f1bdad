"""A trainer that leaves its GPU for the host and comes back."""

from __future__ import annotations

import pytest

from fake_gpu.conftest import Fake

pytestmark = [pytest.mark.fake_gpu, pytest.mark.timeout(300)]


def test_the_trainer_moves_to_the_host_and_back(run_fake: Fake) -> None:
    [found] = run_fake("fake_offload")
    assert found["on the host"] < 1000  # the step counts of AdamW
    assert found["trained"] > 5 * 2**20
    assert found["trained"] == found["back"] == found["trained again"]
