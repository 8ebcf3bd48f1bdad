"""Assign a teacher's logprobs to the student's tokens where the two tokenizers split the same text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


def token_ends(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int | None]:
    """Return the characters of text up to the end of each token; None inside a character."""
    stream = DecodeStream(skip_special_tokens=False)
    ends: list[int | None] = []
    length = 0
    for token in ids:
        piece = stream.step(tokenizer, token)
        length += len(piece or "")
        ends.append(None if piece is None else length)
    return ends


def align(
    student: Sequence[int | None], teacher: Sequence[int | None], logprobs: Sequence[float]
) -> NDArray[np.float32]:
    """Return float32[len(student)]: the teacher's logprob of each student token, NaN where there is none.

    ``student`` and ``teacher`` are ``token_ends`` of the same text, ``logprobs`` those of the teacher's
    tokens. Between two ends that both have, one student token gets the sum over the teacher's tokens of the
    same characters; several student tokens there get NaN, because nothing says how to share the sum.
    """
    values = np.full(len(student), np.nan, np.float32)
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(logprobs, np.float64))])
    after = {end: place + 1 for place, end in enumerate(teacher) if end is not None}
    first, before = 0, 0
    for place, end in enumerate(student):
        if end is None or end not in after:
            continue
        if place == first:
            values[place] = sums[after[end]] - sums[before]
        first, before = place + 1, after[end]
    return values
