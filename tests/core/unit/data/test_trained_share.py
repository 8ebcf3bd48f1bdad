"""Say which share of the sampled tokens can be trained, why not, and the rule that would train more."""

from __future__ import annotations

from typing import Any

from model_calls import model_call

from agentrl.data.finalize_group import describe_share, why_untrained
from agentrl.documents.model_call import DispatchedSamplingTask, FixedModelCall


def call(index: int, tokens: int, parent: int | None = None, **changes: Any) -> DispatchedSamplingTask:
    """A call of ``tokens`` tokens behind the call ``parent``, or at a root of its own."""
    messages = ({"role": "system", "content": "agent"},)
    return model_call("r", index, parent, generated_tokens=tokens, **{"messages": messages, **changes})


def test_an_agent_that_rewrites_its_history_is_told_of_the_rule_agent() -> None:
    title = call(3, 50, messages=({"role": "system", "content": "title"},))
    calls = [call(0, 100), call(1, 200, 0), call(2, 300), title]
    assert describe_share(calls, "main", [2, 3]) == (
        "46% of 650 sampled tokens can be trained; not: 350 left out by train rule main"
        " (train: agent would train 92%)"
    )
    assert describe_share(calls, "agent", [3]) == (
        "92% of 650 sampled tokens can be trained; not: 50 left out by train rule agent"
    )


def test_what_sampling_masks_and_what_another_model_answers_is_not_trained() -> None:
    fixed = FixedModelCall(model="judge", base_url="http://j")
    calls = [call(0, 10), call(1, 30, 0, sampling_params={"top_p": 0.9}), call(2, 5, 1, fixed=fixed)]
    assert describe_share(calls, None, ()) == (
        "25% of 40 sampled tokens can be trained; not: 30 sampled with top_p 0.9"
    )
    assert why_untrained(calls[2], None, ()) == "answered by judge, not by the policy"
    assert describe_share(calls[:1], None, ()) == "100% of 10 sampled tokens can be trained"
    assert describe_share([], None, ()) == "0% of 0 sampled tokens can be trained"
