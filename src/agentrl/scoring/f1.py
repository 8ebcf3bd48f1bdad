"""``f1``: overlap of words with the nearest accepted answer (SQuAD's F1, arXiv 1606.05250)."""

from __future__ import annotations

from collections import Counter

from agentrl.errors import ScorerError
from agentrl.scoring.scorers import ScorerContext, scorer
from agentrl.scoring.text import normalized


@scorer("f1")
async def f1(context: ScorerContext) -> float:
    """The best F1 over all accepted answers, in [0, 1]."""
    if not context.accepted:
        raise ScorerError("the task has no answer to compare with")
    if context.final_answer is None:
        return 0.0
    return max(word_f1(context.final_answer, answer) for answer in context.accepted)


def word_f1(predicted: str, gold: str) -> float:
    """Harmonic mean of precision and recall over the words of the normal forms."""
    words, wanted = normalized(predicted).split(), normalized(gold).split()
    if not words or not wanted:
        return float(words == wanted)
    shared = sum((Counter(words) & Counter(wanted)).values())
    return 2 * shared / (len(words) + len(wanted))
