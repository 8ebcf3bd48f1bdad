"""Build the vocabulary of openai-harmony, for gpt-oss, from the model's tokenizer, without a download."""

from __future__ import annotations

import base64
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer

_VARIABLE = "TIKTOKEN_ENCODINGS_BASE"
_FILE = "o200k_base.tiktoken"


@contextmanager
def harmony_vocabulary(tokenizer: Tokenizer) -> Iterator[None]:
    """Let harmony load the vocabulary of ``tokenizer`` inside this block; it checks the file's hash."""
    if os.environ.get(_VARIABLE):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="agentrl-harmony-") as folder:
        (Path(folder) / _FILE).write_bytes(_tiktoken_file(tokenizer))
        os.environ[_VARIABLE] = folder
        try:
            yield
        finally:
            del os.environ[_VARIABLE]


def _tiktoken_file(tokenizer: Tokenizer) -> bytes:
    """Return one line per token: its bytes in base64, and its id."""
    values = _byte_of_letter()
    rows = sorted((number, text) for text, number in tokenizer.get_vocab(with_added_tokens=False).items())
    lines = []
    for number, text in rows:
        data = base64.b64encode(bytes(values[letter] for letter in text)).decode()
        lines.append(f"{data} {number}\n")
    return "".join(lines).encode()


def _byte_of_letter() -> dict[str, int]:
    """Return the byte of each letter of a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in plain]
    letters = {chr(value): value for value in plain}
    return letters | {chr(256 + place): value for place, value in enumerate(others)}
