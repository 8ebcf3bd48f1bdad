"""docs/metrics.md is what the definitions say, and each metric that code names has one.

``test_every_metric_is_reported`` of the training loop compares them with the metrics of a real step.
"""

from __future__ import annotations

from pathlib import Path

from agentrl.losses.compute import TokenMetrics
from agentrl.observe.metric_definitions import DEFINITIONS, SECTIONS, page

PAGE = Path(__file__).parents[4] / "docs" / "metrics.md"


def test_the_page_is_generated() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "write it again: python -m agentrl.observe.metric_definitions > docs/metrics.md"
    )


def test_each_name_is_defined_once() -> None:
    assert len(DEFINITIONS) == sum(len(section) for section in SECTIONS.values())


def test_the_metrics_of_tokens_are_defined_and_those_with_keys_say_so() -> None:
    metrics = TokenMetrics(
        tokens=2, ratio=2.0, ratio_squared=2.0, kl_reference=0.1, taught=1.0, kl_teacher=0.1,
        staleness={0: 2}, versions={0: 2},
    )  # fmt: skip
    for name, value in metrics.report().items():
        assert DEFINITIONS[name].keyed == isinstance(value, dict), name
