"""Which training data a step cannot train: one datum must not end the training of all others."""

from __future__ import annotations

from agentrl.data.forest import forest_from_data
from agentrl.documents.training import DBRecordData
from agentrl.errors import ForestError


def problem_of(data: DBRecordData, *, vocab_size: int, max_tokens: int) -> str | None:
    """Why ``data`` cannot be trained; None where they can.

    Finds everything that packing refuses: arrays of another length than they say, spans that overlap, values
    that are not finite, ids outside [0, ``vocab_size``), nothing to train, and a sequence up to the last
    trainable token that is longer than a micro-batch of ``max_tokens``.
    """
    try:
        forest = forest_from_data([data], vocab_size=vocab_size)
    except ForestError as error:
        return error.message.removeprefix(f"training data {data.id}: ")
    except ValueError as error:
        return f"its packed arrays cannot be read: {error}"
    if forest.trainable_tokens == 0:
        return "it has no trainable token"
    longest = int(forest.position_ids[forest.target].max()) + 1
    if longest > max_tokens:
        return f"a sequence of {longest} tokens is longer than a micro-batch of --max_tokens {max_tokens}"
    return None
