"""What a teacher's server answers is checked before it is stored."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.columns.teacher import HttpTeacher, Scored
from agentrl.inference.engine import EngineAnswerError

IDS, FIRST = [5, 6, 7, 8], 2


async def score(answer: Any, *, served: str | None = None, top: int = 2) -> Scored:
    """The last two of ``IDS``, scored by a server with this answer."""
    teacher = HttpTeacher("http://user:hunter2@127.0.0.1:1/v9?api_key=hunter2", 5.0)

    async def call(*_: Any) -> Any:
        return answer

    teacher._http = SimpleNamespace(url=teacher.name, call=call)  # type: ignore[assignment]
    teacher._served = served
    return await teacher.score(IDS, FIRST, top)


def sglang(logprob: Any = -1.0, row: Any = ((-0.5, 3, None),), rows: int = 2) -> dict[str, Any]:
    own = [[logprob, id, None] for id in IDS[FIRST:]]
    return {"meta_info": {"input_token_logprobs": own, "input_top_logprobs": [list(row)] * rows}}


def vllm(own: float, **others: float) -> dict[str, Any]:
    rows = [{str(id): {"logprob": own}} | {id_: {"logprob": v} for id_, v in others.items()} for id in IDS]
    return {"choices": [{"prompt_logprobs": rows}]}


@pytest.mark.attack
@pytest.mark.parametrize(
    "answer",
    [
        sglang(logprob=None), sglang(logprob=math.nan), sglang(logprob=7.0), sglang(logprob=math.inf),
        sglang(rows=1), sglang(rows=0), sglang(row=[(-0.5, -3, None)]), sglang(row=[(-0.5, 2**40, None)]),
        sglang(row=[(-0.5, 2**63, None)]), sglang(row=[(1e300, 3, None)]), sglang(row=[(-0.5, 1e300, None)]),
        sglang(row=[(math.nan, 3, None)]), sglang(row=[(None, 3, None)]),
    ],
)  # fmt: skip
async def test_what_no_distribution_has_is_an_answer_that_is_not_used(answer: Any) -> None:
    with pytest.raises(EngineAnswerError, match="unknown format") as refused:
        await score(answer)
    assert "hunter2" not in refused.value.message


@pytest.mark.parametrize(
    ("answer", "served"),
    [
        (sglang(row=[(-0.5, 3, None), (-2.0, 9, None), (-9.0, 1, None), (-math.inf, 4, None)]), None),
        (vllm(-1.0, **{"3": -0.5, "9": -2.0, "1": -9.0, "4": -9999.0}), "teacher"),
    ],
)
async def test_the_likeliest_ids_are_kept_and_those_without_probability_are_not(
    answer: Any, served: str | None
) -> None:
    scored = await score(answer, served=served, top=3)
    assert scored.logprobs.tolist() == [-1.0, -1.0]
    assert scored.top is not None
    expected = [1, 3, 9] if served is None else [3, 7, 9]
    assert scored.top.ids.ids.tolist()[:3] == expected
    everything = await score(answer, served=served, top=1000)
    assert everything.top is not None
    assert 4 not in everything.top.ids.ids


async def test_a_sampled_token_without_probability_has_a_finite_logprob() -> None:
    assert (await score(sglang(logprob=-math.inf))).logprobs.tolist() == [-100.0, -100.0]
    assert (await score(sglang(logprob=-1e300), top=0)).top is None


def test_a_secret_in_the_url_is_in_no_name() -> None:
    assert HttpTeacher("http://user:hunter2@gpu7:1/v9/?api_key=hunter2", 5.0).name == "http://gpu7:1/v9"
