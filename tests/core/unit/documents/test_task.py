"""Test the names of weighted sums of scorers, and how tasks give them."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.documents.task import scorer_weights, sum_name
from agentrl.documents.task_json import BadTaskError, make_task


@pytest.mark.parametrize(
    ("weights", "name"),
    [
        ({"exact": 0.8, "format": 0.2}, "0.8*exact + 0.2*format"),
        ({"my.module:fn": 1, "rubric": -0.5}, "1*my.module:fn + -0.5*rubric"),
        ({"exact": 1}, "exact"),
        ({"exact": 2}, "2*exact"),
        ({"exact": 1e-05, "f1": 1e20}, "1e-05*exact + 1e+20*f1"),
    ],
)
def test_a_sum_has_a_name_that_is_read_back(weights: dict[str, float], name: str) -> None:
    assert sum_name(weights) == name
    assert scorer_weights(name) == weights
    assert make_task({"id": 1, "query": "q", "scorer": weights}, "train", 1).scorer == name


@pytest.mark.parametrize("name", ["exact", "my.module:fn", "c++", "a*b"])
def test_a_plain_name_has_the_weight_1(name: str) -> None:
    assert scorer_weights(name) == {name: 1.0}


@pytest.mark.parametrize(
    ("scorer", "problem"),
    [
        ({}, "scorer: it names no scorer"),
        ({"exact": "much"}, "the weight of exact is 'much'"),
        ({"exact": True}, "the weight of exact is True"),
        ({"my scorer": 1.0}, "'my scorer' is not the name of a scorer"),
        (["exact"], r"scorer is \['exact'\]; it must be text"),
        ("", "scorer is ''; it must be text that is not empty"),
    ],
)
def test_a_bad_scorer_is_a_bad_task(scorer: Any, problem: str) -> None:
    with pytest.raises(BadTaskError, match=problem):
        make_task({"id": 1, "query": "q", "scorer": scorer}, "train", 1)
