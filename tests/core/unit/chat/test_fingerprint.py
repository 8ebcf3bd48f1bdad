"""A tokenizer's fingerprint depends on what it does, not on how its file is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from agentrl.chat.model_folder import tokenizer_fingerprint
from agentrl.errors import ModelError


def save(folder: Path, change: Callable[[dict[str, Any]], None] = lambda _: None, **form: Any) -> str | None:
    """Write a tokenizer of 280 ids with ``change`` applied to its JSON; return its fingerprint."""
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the quick foxes ran: return a tag, quick quick the the"], trainer)
    content = json.loads(tokenizer.to_str())
    change(content)
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(content, **form), encoding="utf-8")
    return tokenizer_fingerprint(folder)


def swap_two_ids(content: dict[str, Any]) -> None:
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def drop_merges(content: dict[str, Any]) -> None:
    content["model"]["merges"] = []


def lower(content: dict[str, Any]) -> None:
    content["normalizer"] = {"type": "Lowercase"}


def add_token(content: dict[str, Any]) -> None:
    fields = ("single_word", "lstrip", "rstrip", "normalized")
    token = {"id": 280, "content": "<tool>", "special": True, **dict.fromkeys(fields, False)}
    content["added_tokens"].append(token)


def test_copies_compare_equal_however_they_are_written(tmp_path: Path) -> None:
    assert save(tmp_path / "a") == save(tmp_path / "b", indent=4, sort_keys=True, ensure_ascii=False)


@pytest.mark.parametrize("change", [swap_two_ids, drop_merges, lower, add_token])
def test_another_vocabulary_or_other_ids_differ(
    change: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    assert save(tmp_path / "a") != save(tmp_path / "b", change)


def test_a_folder_without_a_tokenizer_has_none_and_a_broken_file_is_an_error(tmp_path: Path) -> None:
    assert tokenizer_fingerprint(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("<html>")
    with pytest.raises(ModelError):
        tokenizer_fingerprint(tmp_path)
