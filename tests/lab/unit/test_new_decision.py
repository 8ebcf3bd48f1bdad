"""A group that is decided anew: what is stored of the decision before."""

from __future__ import annotations

from agentrl.lab.regroup import decided
from agentrl.store.groups import GroupOutcome


def test_a_new_decision_takes_back_what_withheld_the_group_from_training() -> None:
    earlier = {"outcome": "mixed", "finalized_at": "then", "kept_as_trained": True, "problem": "none"}
    changes = decided({"group": earlier}, GroupOutcome(summary={"outcome": "agree"}))
    assert changes["group"] == {"$literal": {"outcome": "agree", "finalized_at": "then"}}
    assert "ease" not in changes
