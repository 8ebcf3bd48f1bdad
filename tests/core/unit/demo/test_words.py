"""The environments of word lists: their questions, and how near an answer is."""

from __future__ import annotations

import pytest
from demo.words import WORDS, ReverseWords, SortWords

from agentrl import Environment, ScorerContext, TaskRequest


def request(n: int, split: str = "train") -> TaskRequest:
    return TaskRequest(n=n, seed=1, split=split)


def score(kind: type[Environment], answer: str, given: str | None) -> float:
    return kind.score(ScorerContext(query="?", final_answer=given, answer=answer)).score  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", [ReverseWords, SortWords])
def test_its_questions_are_reproducible_and_held_out_ones_are_of_other_words(kind: type[Environment]) -> None:
    train, held_out = list(kind.tasks(request(50))), list(kind.tasks(request(50, "eval")))
    assert list(kind.tasks(request(9))) == train[:9]
    asked, others = (
        {word for task in tasks for word in task["answer"].split()} for tasks in (train, held_out)
    )
    assert asked <= set(WORDS["train"].split())
    assert others <= set(WORDS["eval"].split())
    assert not asked & others
    assert len({task["query"] for task in train}) > 40


def test_the_right_answer_scores_1_and_a_copy_of_the_question_less() -> None:
    (task,) = ReverseWords.tasks(request(1))
    words = task["query"].partition(": ")[2].split()
    assert task["answer"].split() == words[::-1]
    copied = score(ReverseWords, task["answer"], " ".join(words))
    assert 0 < copied < 0.5 < score(ReverseWords, task["answer"], " ".join(words[:0:-1]))
    assert score(ReverseWords, task["answer"], task["answer"]) == 1
    assert score(ReverseWords, task["answer"], None) == 0


def test_examples_are_answered_as_the_question_asks() -> None:
    (task,) = SortWords.tasks(request(1))
    assert task["messages"][:2] == [
        {"role": "user", "content": "Sort the words by the alphabet: snow tree bee"},
        {"role": "assistant", "content": "<answer>bee snow tree</answer>"},
    ]
