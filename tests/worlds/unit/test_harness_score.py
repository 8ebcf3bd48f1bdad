"""Read the score that a harness leaves: a text that is no score is refused with words."""

from __future__ import annotations

import pytest

from agentrl.errors import HarnessError
from agentrl.worlds.harness.agent import _read_score


@pytest.mark.attack
@pytest.mark.parametrize(
    "text", ["9" * 311, "9" * 5000, "[" * 200_000, "1e999", "NaN", '"\\ud800"', '{"score": true}', ""]
)
def test_a_text_that_is_no_score_is_named(text: str) -> None:
    with pytest.raises(HarnessError, match=r"the file 'score' holds .*, not a score"):
        _read_score(text, "the file 'score'")


def test_a_score_may_have_details_that_bson_cannot_hold() -> None:
    result = _read_score('{"score": 1, "details": {"\\ud800": [1' + "0" * 311 + "]}}", "the file")
    assert (result.score, result.details) == (1.0, {"?": ["1" + "0" * 311]})
