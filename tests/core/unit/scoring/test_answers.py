"""Test the extraction of final answers by schema."""

from __future__ import annotations

import time

import pytest
from made_documents import made_task

from agentrl.documents.task_json import BadTaskError
from agentrl.environments.environment import names_of
from agentrl.errors import ConfigError, ScorerError
from agentrl.scoring.answers import answer_seen_in, extract_answer, leaked_in, require_readable
from agentrl.scoring.scorers import SCORERS, ScorerContext, scorer


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ("<answer> 4 </answer>", "answer", "4"), ("<answer>3</answer> no, <answer>4</answer>", "answer", "4"),
        ("<answer>unfinished <answer>4</answer>", "answer", "4"),
        ("<answer>two\nlines</answer>", "answer", "two\nlines"),
        ("<think><answer>1</answer></think>none yet", "answer", None),
        ("<think>x</think><answer>2</answer>", "answer", "2"), ("<answer></answer>", "answer", ""),
        ("no answer", "answer", None), ("<result>5</result><answer>4</answer>", "result", "5"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", "boxed", r"\frac{1}{2}"), (r"\fbox{7}", "boxed", "7"),
        (r"\boxed{1} \fbox{7}", "boxed", "1"), (r"\boxed{\{1, 2\}}", "boxed", r"\{1, 2\}"),
        (r"\boxed{1} \boxed{2", "boxed", "1"), (r"\boxed 4", "boxed", "4"),
        (r"so $\boxed \frac{1}{2}$.", "boxed", r"\frac{1}{2}"), (r"\boxed A.", "boxed", "A"),
        (r"\boxed-70,000, that is", "boxed", "-70,000"), (r"\boxed{3} as \boxed 4", "boxed", "3"),
        (r"give it in \boxed form", "boxed", None), (r"\boxed{\boxed{5}}", "boxed", "5"),
        (r"\boxed{a\}b}", "boxed", r"a\}b"), ("#### Step 1\n48/2 = 24\n#### 72", "####", "72"),
        ("#### 5\n#### $1,234.50.", "####", "1,234.50"), ("#### -$5", "####", "-5"),
        (r"#### \$70,000", "####", "70,000"), ("72", "####", None), ("#### 1/2", "####", "1/2"),
        ("#### 10:30", "####", "10:30"), ("#### 1e5", "####", "1e5"), ("#### 5 million", "####", "5 million"),
        ("#### €72", "####", "72"), ("#### −72", "####", "-72"), ("#### **72**", "####", "72"),
        (r"#### \boxed{72}", "####", "72"), ("#### 72 apples.", "####", "72"),
        ("Answer：34", "Answer:", "34"),
        ("**Answer:**\n\n34", "Answer:", "34"), ("The sum is 34.\n\nAnswer: 34", "Answer:", "34"),
        ("Answer: $34$", "Answer:", "34"), ("**Answer:** $\\boxed{34}$.", "Answer:", "34"),
        ("Answer:\n34", "Answer:", "34"), ("**Final Answer: 3,400**", "Answer:", "3,400"),
        ("Answer: \\(x^2\\)", "Answer:", "x^2"), ("Answer: $72", "Answer:", "$72"),
        ("Answer: 1\nno,\nanswer: -\\frac{1}{2}", "Answer:", "-\\frac{1}{2}"),
        ("<think>Answer: 3</think>34", "Answer:", None), ("Answer:", "Answer:", None),
        ("34", "Answer:", None),
    ],
)  # fmt: skip
def test_last_marked_answer(text: str, schema: str, expected: str | None) -> None:
    assert extract_answer(text, schema) == expected


@pytest.mark.parametrize("schema", ["", "two words", "<answer>", "4th"])
def test_a_schema_that_is_no_word(schema: str) -> None:
    with pytest.raises(ConfigError, match="answer_schema is"):
        extract_answer("", schema)


@pytest.mark.parametrize("unit", ["\\boxed{", "{", "\\boxed 1", "\\boxed ", "\\", "<answer>", "#### ", "}"])
def test_the_cost_grows_with_the_length_of_the_text(unit: str) -> None:
    started = time.process_time()
    for schema in ("boxed", "answer", "####"):
        extract_answer(unit * 20_000, schema)
    assert time.process_time() - started < 2


@pytest.mark.attack
@pytest.mark.parametrize(
    ("text", "schema", "answer"),
    [
        ("####{}", "####", None), ("####{}#", "####", None), ("####{}\n{}", "####", None),
        ("####{}72", "####", "72"), ("####{}\n{}72", "####", "72"), ("####{}\n\n72", "####", None),
        ("answer{}", "Answer:", None), ("answer:{}", "Answer:", None), ("answer{}:{}72", "Answer:", "72"),
    ],
)  # fmt: skip
def test_half_a_million_spaces_are_read_once(text: str, schema: str, answer: str | None) -> None:
    # Quadratic, each would take half an hour.
    assert extract_answer(text.replace("{}", " " * 500_000), schema) == answer


@pytest.mark.parametrize("scorer", ["exact", "f1", "math", "0.8*exact + 0.2*format"])
def test_a_scorer_that_compares_needs_an_answer(scorer: str) -> None:
    with pytest.raises(BadTaskError, match="compares with an answer, and the task has none"):
        require_readable(made_task(scorer=scorer))
    require_readable(made_task(scorer=scorer, aug_answers=("4",)))


@pytest.mark.parametrize("scorer", ["agentcpm", "asearcher", "rubric", "format", "feedback"])
def test_a_judge_needs_no_answer(scorer: str) -> None:
    require_readable(made_task(scorer=scorer))


def holds_tests(answer: object) -> None:
    if not isinstance(answer, list):
        raise ScorerError("the answer holds no tests", hint="give a list")


def test_a_scorer_says_what_it_reads_in_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SCORERS, "_registered", dict(SCORERS.known()))

    @scorer("tested", check_answer=holds_tests, names_in_answer=lambda answer: ["image(x)"])
    def tested(answer: str, truth: dict[str, object]) -> float:
        return 1.0

    for name in ("tested", "0.5*format + 0.5*tested"):
        require_readable(made_task(scorer=name, answer=["1"]))
        assert names_of(made_task(scorer=name, answer=["1"])) == {"image(x)"}
        with pytest.raises(BadTaskError, match=r"scorer tested: the answer holds no tests\n.*give a list"):
            require_readable(made_task(scorer=name, answer="1"))
    assert names_of(made_task(scorer="format", answer=["1"])) == frozenset()


def test_a_scorer_that_nobody_has_allowed_is_not_imported_to_ask_it() -> None:
    task = made_task(scorer="this.module:exits", answer="1")
    require_readable(task)
    assert names_of(task) == {"this.module:exits"}


QUESTION = "Which is the largest animal that has ever lived on the earth?"


def looked_up(
    result: str, *, answer: object = "The blue whale", question: str = QUESTION, says: str = "I look.",
    arguments: dict[str, object] | None = None,
) -> ScorerContext:  # fmt: skip
    """A trajectory that asks a tool once and answers what it read."""
    call = {"id": "c1", "function": {"name": "search", "arguments": arguments or {"query": "largest animal"}}}
    return ScorerContext(
        query=question, final_answer="x", answer=answer,
        messages=(
            {"role": "user", "content": question},
            {"role": "assistant", "content": says, "tool_calls": [call]},
            {"role": "tool", "content": result, "tool_call_id": "c1"},
            {"role": "assistant", "content": f"<answer>{answer}</answer>"},
        ),
    )  # fmt: skip


COPY = "Q: which is the largest animal that has ever lived on the earth  A: the BLUE whale."


@pytest.mark.parametrize(
    ("context", "auto", "named"),
    [
        (looked_up(COPY), "search", "search"),
        (looked_up("The blue whale is large."), None, "search"),  # a source, which a search looks for
        (looked_up("The blue whales are large."), None, None),  # another word
        (looked_up(COPY, says="Is it the blue whale?"), None, None),  # the model had it first
        (looked_up(COPY, arguments={"query": "size of a whale"}), None, None),  # and a part of it
        (looked_up(COPY, arguments={"query": QUESTION}), None, "search"),  # it repeats what it was asked
        (looked_up(COPY, answer="yes"), None, None),
        (looked_up(COPY.replace("the BLUE whale", "42"), answer=42), None, None),
        (looked_up("4 + 4 = 8", answer="8", question="What is 4 + 4?"), None, None),
        (looked_up("391000", answer="391000", question="What is 391 * 1000?"), None, "search"),
        (looked_up("Who wrote Hamlet? Shakespeare", answer="Shakespeare", question="Who wrote Hamlet?"),
         "search", "search"),
        (looked_up(COPY, question=f"{QUESTION} An elephant, or the blue whale?"), None, None),
        (looked_up(COPY, answer=["a whale", "blue whale"]), "search", "search"),
    ],
)  # fmt: skip
def test_a_result_that_has_the_answer(context: ScorerContext, auto: str | None, named: str | None) -> None:
    assert answer_seen_in(context, "auto") == auto
    assert answer_seen_in(context, "read, search") == named
    assert answer_seen_in(context, "read") is None
    assert answer_seen_in(context, "none") is None


ASKED = "中国第一个获得诺贝尔文学奖的作家是谁？请写出他的全名。"


@pytest.mark.parametrize(
    ("context", "auto", "named"),
    [
        (looked_up(f"题目：{ASKED}答案：管谟业。", question=ASKED, answer="管谟业"), "search", "search"),
        (looked_up("他叫管谟业。", question=ASKED, answer="管谟业"), None, "search"),
        (looked_up("他叫管谟业。", question=ASKED, answer="管谟业", says="是管谟业吗？"), None, None),
        (looked_up("他叫管谟。", question=ASKED, answer="管谟业"), None, None),
        (looked_up("서울대학교입니다", question="어느 대학입니까?", answer="서울대학교"), None, "search"),
        (looked_up("ＡＢＣ－１２３４５", question="Which code?", answer="ABC-12345"), None, "search"),
    ],
)  # fmt: skip
def test_a_result_in_a_script_without_spaces(
    context: ScorerContext, auto: str | None, named: str | None
) -> None:
    assert (answer_seen_in(context, "auto"), answer_seen_in(context, "search")) == (auto, named)


def test_a_prompt_in_a_script_without_spaces_that_gives_the_answer() -> None:
    choice = made_task(query="首都是北京市还是上海市？", answer="北京市")
    assert leaked_in(choice) is None
    assert leaked_in(made_task(query="中华人民共和国在哪里？", answer="中华人民共和国")) == "the question"


def test_a_long_conversation_is_searched_in_no_time() -> None:
    context = looked_up("nothing " * 4000)
    long = ScorerContext(
        query=QUESTION, final_answer="x", answer="The blue whale", messages=context.messages * 50
    )
    began = time.perf_counter()
    assert answer_seen_in(long, "auto") is None
    assert time.perf_counter() - began < 0.5
