"""Hash the files that loading a model reads, each once for every state of it on this machine."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agentrl.atomic_folder import replace_file
from agentrl.documents.run import FileChecksum
from agentrl.weights.folder import weight_files
from agentrl.weights.model_folder import checksums

logger = logging.getLogger(__name__)

_CACHE = Path(".agentrl/checksums")
_READ = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|merges"
    r"|chat_template|processor_config|preprocessor_config|video_preprocessor_config)\.(json|txt|jinja|model)"
    r"|.*\.(index\.json|py|tiktoken|spm)"
)
"""Files beside the weights that change what a model computes. A README does not."""


def read_files(folder: Path) -> dict[str, str]:
    """Return {name: SHA-256} of the files that loading ``folder`` reads: weights, configuration, tokenizer.

    Raises PublishError or ModelError if one cannot be read.
    """
    weights = {path.name for path in weight_files(folder)}
    found = known_checksums(folder)
    return {file.name: file.sha256 for file in found if file.name in weights or _READ.fullmatch(file.name)}


def known_checksums(folder: Path) -> tuple[FileChecksum, ...]:
    """Return the checksums of all files in ``folder``, as ``checksums`` does, without reading one twice.

    A file is read again unless its inode, size, and times of modification and of change are those of the last
    time. Copies that keep the time of modification, as ``rsync -t`` makes, differ in the time of change,
    which no program can set; so a start with a large model costs a look at its folder.
    """
    place = folder.resolve()
    cache = _CACHE / f"{hashlib.sha256(str(place).encode()).hexdigest()[:32]}.json"
    states = dict(_states(place))
    stored = _read(cache)
    known = [
        FileChecksum.from_document(stored[name]["checksum"])
        for name, state in states.items()
        if stored.get(name, {}).get("state") == state
    ]
    found = checksums(place, known)
    if len(known) < len(found):
        # What changed while it was read has another state than before, and is read again next time.
        content = {file.name: {"state": states[file.name], "checksum": file.to_document()}
                   for file in found if file.name in states}  # fmt: skip
        try:
            cache.parent.mkdir(parents=True, exist_ok=True)
            replace_file(cache, json.dumps({"folder": str(place), "files": content}, indent=1).encode())
        except OSError as error:
            logger.debug("%s cannot be written, so that models are hashed at every start: %s", cache, error)
    return found


def _states(folder: Path) -> Iterable[tuple[str, list[int]]]:
    for entry in os.scandir(folder) if folder.is_dir() else ():
        if entry.is_file():
            status = entry.stat()
            yield entry.name, [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _read(cache: Path) -> dict[str, Any]:
    try:
        found = json.loads(cache.read_text(encoding="utf-8"))["files"]
        return {name: item for name, item in found.items() if item["state"] and item["checksum"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
