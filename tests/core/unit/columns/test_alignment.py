"""A teacher's logprobs are assigned to the student's tokens where both tokenizers end a token."""

from __future__ import annotations

import math

import numpy as np
from tiny_policy import tiny_tokenizer

from agentrl.columns.teacher import align, token_ends

NONE = math.nan


def test_the_ends_of_tokens_count_characters_and_are_none_inside_one() -> None:
    tokenizer = tiny_tokenizer().backend_tokenizer
    ids = tokenizer.encode("aé<|im_end|>b").ids
    assert token_ends(tokenizer, ids) == [1, None, 2, 12, 13]


def test_one_token_gets_the_sum_and_several_that_share_an_end_get_nothing() -> None:
    student, teacher = [2, 4, 5, 9], [1, 2, 5, 7, 9]
    found = align(student, teacher, [-1.0, -2.0, -4.0, -8.0, -16.0])
    np.testing.assert_array_equal(found, np.array([-3.0, NONE, NONE, -24.0], np.float32))


def test_equal_tokens_keep_their_logprobs_and_a_split_character_has_none() -> None:
    same = [1, 2, 3]
    np.testing.assert_array_equal(align(same, same, [-1.0, -2.0, -3.0]), np.array([-1, -2, -3], np.float32))
    found = align([1, None, 2], [1, 2], [-1.0, -2.0])
    np.testing.assert_array_equal(found, np.array([-1.0, NONE, NONE], np.float32))
    assert len(align([], [], [])) == 0
