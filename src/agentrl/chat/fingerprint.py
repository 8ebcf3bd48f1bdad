"""Hash the behaviour of a tokenizer, so that copies of it whose files differ compare equal."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from agentrl.chat.model_folder import read_tokenizer_file

_PROBE = (
    "The 3 quick foxes ran 1,048,576 m; naïve café, Ünïcödé, 你好世界, привет, emoji 🙂🚀.\n\n\tdef f(x):\n"
    '    return {"a": [1, 2.5e-3], \'b\': None}  # tabs\tand  spaces\r\n<tag attr="1">\\frac{1}{2}</tag>'
)
"""Text whose ids depend on merges, normalization, digits and whitespace."""


def tokenizer_fingerprint(folder: str | Path) -> str | None:
    """Return a hash of the vocabulary and of the ids of a fixed text; None for a folder without a tokenizer.

    Raises ModelError for a tokenizer that cannot be read.
    """
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        return None
    tokenizer = read_tokenizer_file(path)
    vocabulary = sorted(tokenizer.get_vocab(with_added_tokens=True).items())
    ids = tokenizer.encode(_PROBE, add_special_tokens=False).ids
    content = json.dumps([vocabulary, ids], ensure_ascii=True).encode()
    return f"sha256 {hashlib.sha256(content).hexdigest()[:16]}"
