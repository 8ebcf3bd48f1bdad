"""Read a Hugging Face folder: tokenizer and its hash, template, special tokens, stop ids, context length."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.base.installation import require
from agentrl.config.schema import ModelConfig
from agentrl.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, kw_only=True)
class ChatFiles:
    """The tokenizer, template and configuration that define a model's chat format."""

    tokenizer: Tokenizer
    template: str | None
    special_tokens: Mapping[str, str]
    """``bos_token``, ``eos_token``, … by name."""
    stop_ids: frozenset[int]
    config: Mapping[str, Any]
    """``config.json``; empty if there is none."""


def read_chat_files(folder: str | Path, chat_template: str | Path | None = None) -> ChatFiles:
    """Read a folder; ``chat_template`` is a file that replaces its template.

    Raises ModelError for a folder without a tokenizer.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ModelError(
            f"{root} is not a folder", hint="give --model_name_or_path the folder of a Hugging Face model"
        )
    settings = _read_json(root / "tokenizer_config.json")
    tokenizer = _read_tokenizer(root)
    special = _special_tokens(root, settings)
    return ChatFiles(
        tokenizer=tokenizer,
        template=_read_template(root, settings, chat_template),
        special_tokens=special,
        stop_ids=_stop_ids(root, tokenizer, special.get("eos_token")),
        config=_read_json(root / "config.json"),
    )


def read_tokenizer_file(path: Path) -> Tokenizer:
    """Read a ``tokenizer.json``; truncation and padding are off.

    Raises ModelError for a file that is not a tokenizer.
    """
    from tokenizers import Tokenizer  # a machine that shows the dashboard alone has none

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one text at a time: threads would not help
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise ModelError(
            f"{path} is not a tokenizer: {error}", hint="copy the model's folder again"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}", hint="copy the model's folder again") from error
    return content if isinstance(content, dict) else {}


def _read_tokenizer(root: Path) -> Tokenizer:
    """Read ``tokenizer.json``; convert an older format by transformers."""
    path = root / "tokenizer.json"
    if path.is_file():
        return read_tokenizer_file(path)
    if not any((root / name).is_file() for name in ("tokenizer.model", "vocab.json", "vocab.txt")):
        raise ModelError(
            f"{root} has no tokenizer.json",
            hint="copy tokenizer.json and tokenizer_config.json of the model into the folder",
        )
    require("transformers", f"the tokenizer in {root}, of an older format,")
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(root, local_files_only=True)
        return Tokenizer.from_str(converted.backend_tokenizer.to_str())
    except (AttributeError, OSError, ValueError, ImportError) as error:
        raise ModelError(
            f"the tokenizer in {root} cannot be converted: {error}",
            hint="save it once with AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
        ) from error


def _read_template(root: Path, settings: Mapping[str, Any], replacement: str | Path | None) -> str | None:
    if replacement is not None:
        return _read_text(Path(replacement), "--chat_template")
    for name in ("chat_template.jinja", "chat_template.json"):
        if (root / name).is_file():
            text = _read_text(root / name, "the chat template")
            return text if name.endswith(".jinja") else str(json.loads(text).get("chat_template", ""))
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template}
        template = named.get("tool_use") or named.get("default")
    return template if isinstance(template, str) and template else None


def _read_text(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(
            f"{what} {path} cannot be read: {error}", hint="give an existing text file"
        ) from error


def _special_tokens(root: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    values = {**_read_json(root / "special_tokens_map.json"), **settings}
    tokens = {}
    for name, value in values.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                tokens[name] = text
    return tokens


def _stop_ids(root: Path, tokenizer: Tokenizer, eos_token: str | None) -> frozenset[int]:
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _read_json(root / name).get("eos_token_id")
        ids.update(value if isinstance(value, list) else [value] if isinstance(value, int) else [])
    named = tokenizer.token_to_id(eos_token) if eos_token else None
    return frozenset(ids | ({named} if named is not None else set()))


_PROBE = (
    "The 3 quick foxes ran 1,048,576 m; naïve café, Ünïcödé, 你好世界, привет, emoji 🙂🚀.\n\n\tdef f(x):\n"
    '    return {"a": [1, 2.5e-3], \'b\': None}  # tabs\tand  spaces\r\n<tag attr="1">\\frac{1}{2}</tag>'
)
"""Text whose ids depend on merges, normalization, digits and whitespace."""


def tokenizer_fingerprint(folder: str | Path) -> str | None:
    """Return a hash of the vocabulary and of the ids of a fixed text; None for a folder without a tokenizer.

    Copies of a tokenizer whose files differ have one hash.
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


_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")


def model_context_length(folder: str | Path) -> int | None:
    """Return the largest number of tokens of a prompt and its continuation; None if it is not configured."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    text = config.get("text_config")
    length = _length_of(config)
    return length if length is not None or not isinstance(text, dict) else _length_of(text)


def context_length(config: ModelConfig, folder: str | Path | None) -> int | None:
    """Return ``--max_model_len``, or the length that the model in ``folder`` is configured for.

    None if neither is known. Raises ConfigError for a ``--max_model_len`` above the model's own length.
    """
    own = None if folder is None else model_context_length(folder)
    length = config.max_model_len
    if length is None or own is None:
        return length or own
    if length > own:
        raise ConfigError(
            f"--max_model_len {length} is more than the {own} tokens of the model's configuration",
            hint=f"set --max_model_len {own} or less, or extend the rotary scaling in {folder}/config.json",
        )
    return length


def _length_of(config: Mapping[str, Any]) -> int | None:
    length = next((config[name] for name in _LENGTHS if type(config.get(name)) is int), None)
    return None if length is None else _with_rotary_scaling(length, config)


def _with_rotary_scaling(length: int, config: Mapping[str, Any]) -> int:
    """Return the configured length as rotary scaling extends it.

    A scaling that names its original length may be counted in the configured one already, as in Llama 3.1.
    YaRN's factor is of the original length: Qwen3 has 40,960 positions, and 131,072 with a factor of 4.
    """
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, dict) or scaling.get("rope_type") == "llama3":
        return length
    factor, original = scaling.get("factor", 1.0), scaling.get("original_max_position_embeddings")
    if not isinstance(factor, (int, float)):
        return length
    if original is None:
        return int(length * factor)
    is_yarn = scaling.get("rope_type", scaling.get("type")) == "yarn" and isinstance(original, int)
    return max(length, int(original * factor)) if is_yarn else length


_HARMONY_FOLDER = "TIKTOKEN_ENCODINGS_BASE"
_HARMONY_FILE = "o200k_base.tiktoken"


@contextmanager
def harmony_vocabulary(tokenizer: Tokenizer) -> Iterator[None]:
    """Let harmony load the vocabulary of ``tokenizer`` inside this block; it checks the file's hash."""
    if os.environ.get(_HARMONY_FOLDER):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="agentrl-harmony-") as folder:
        (Path(folder) / _HARMONY_FILE).write_bytes(_tiktoken_file(tokenizer))
        os.environ[_HARMONY_FOLDER] = folder
        try:
            yield
        finally:
            del os.environ[_HARMONY_FOLDER]


def _tiktoken_file(tokenizer: Tokenizer) -> bytes:
    """Return a byte-level vocabulary as tiktoken's file: a line per token, its bytes in base64 and its id."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in plain]
    byte_of = {chr(value): value for value in plain} | {chr(256 + i): value for i, value in enumerate(others)}
    rows = sorted((number, text) for text, number in tokenizer.get_vocab(with_added_tokens=False).items())
    lines = (
        f"{base64.b64encode(bytes(byte_of[letter] for letter in text)).decode()} {number}\n"
        for number, text in rows
    )
    return "".join(lines).encode()
