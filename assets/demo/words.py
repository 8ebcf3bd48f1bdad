"""Environments ``demo.words:ReverseWords`` and ``SortWords``: write a list of words in another order.

Small relatives of prime-rl's reverse-text and alphabet-sort. Two worked examples precede each question. The
score is the similarity of the two lists of words, by difflib: 1 for the right order, 0 without an answer.
Held-out questions are of other words than those of training.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from typing import Any

from agentrl import Environment, ScorerContext, ScoreResult, TaskRequest

WORDS = {
    "train": """apple bird boat bread brick bridge candle castle chair clock cloud coat coin corn desk dog
        door dress drum eagle farm fire fish flag floor forest fox garden gate glass gold grass hammer
        hand hat hill honey horse house ice ink island key king kite lake lamp leaf letter lion map market
        milk mirror moon mountain mouse nail nest night oak ocean onion paint paper pearl pen pig plate
        pond queen rabbit rain ring river road roof rope rose salt sand school sea seed shell ship shoe
        silk silver sky""",
    "eval": """ant arm bag ball basket bell bone bottle box butter camel city cow crown cup egg engine
        field flower fruit goat harbor heart iron jar jewel knife ladder lemon lock meat needle nut orange
        oven page picture pipe potato rice""",
}
"""Of training, and of evaluations."""
SHOWN = (("snow", "tree", "bee"), ("wheel", "table", "yard", "stone"))


class _Words(Environment):
    """Lists of three to five words; a subclass orders them."""

    task_defaults = {"agent_name": "single_turn"}  # noqa: RUF012
    asked: str

    @classmethod
    def ordered(cls, words: Sequence[str]) -> Iterable[str]:
        """Return the words in the order that is asked."""
        return words

    @classmethod
    def tasks(cls, request: TaskRequest) -> Iterator[dict[str, Any]]:
        """Yield a question for each of ``request.n`` random lists."""
        choice = random.Random(request.random_seed)
        words = WORDS[request.split].split()
        shown = [message for example in SHOWN for message in cls.example(example)]
        for _ in range(request.n):
            asked = choice.sample(words, choice.randint(3, 5))
            query = f"{cls.asked}: {' '.join(asked)}"
            yield {"query": query, "answer": " ".join(cls.ordered(asked)), "messages": shown}

    @classmethod
    def example(cls, words: Sequence[str]) -> list[dict[str, str]]:
        """Return a question with its answer, as messages."""
        return [
            {"role": "user", "content": f"{cls.asked}: {' '.join(words)}"},
            {"role": "assistant", "content": f"<answer>{' '.join(cls.ordered(words))}</answer>"},
        ]

    @classmethod
    def score(cls, context: ScorerContext) -> ScoreResult:
        """Return how alike the answer and the right one are, word by word."""
        given, right = (str(text or "").split() for text in (context.final_answer, context.answer))
        return ScoreResult(SequenceMatcher(None, given, right, autojunk=False).ratio())


class ReverseWords(_Words):
    """The last word first."""

    asked = "Reverse the words"

    @classmethod
    def ordered(cls, words: Sequence[str]) -> Iterable[str]:
        """Return the words from the last to the first."""
        return reversed(words)


class SortWords(_Words):
    """The words by the alphabet."""

    asked = "Sort the words by the alphabet"

    @classmethod
    def ordered(cls, words: Sequence[str]) -> Iterable[str]:
        """Return the words sorted."""
        return sorted(words)
