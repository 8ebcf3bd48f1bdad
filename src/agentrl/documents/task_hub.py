"""Open the tasks of a data set of the Hugging Face hub: ``hf://ORG/NAME[/CONFIG][@REVISION][:SPLIT]``.

Only data files are downloaded, into the hub's cache; no code of a repository is run. Without network the
cache is read.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import httpx2

from agentrl.documents.task_folders import find_files, read_plain
from agentrl.documents.task_source import TaskSource
from agentrl.documents.task_tables import open_tables
from agentrl.errors import TaskFileError
from agentrl.extras import require

logger = logging.getLogger(__name__)

HUB: Final = "hf://"
_ADDRESS = re.compile(r"hf://([\w.-]+(?:/[\w.-]+)?)(?:/([^@:]+))?(?:@([^:]+))?(?::(.+))?")
_SECONDS = 30.0


def open_hub(text: str, wanted: str) -> TaskSource:
    """Download a split, ``wanted`` unless the address names one, and open it. Raises TaskFileError.

    Its tasks may not name Python code: others write them.
    """
    address = _ADDRESS.fullmatch(text)
    if address is None:
        raise TaskFileError(
            f"{text}: this is not the address of a data set",
            hint="write hf://ORG/NAME[/CONFIG][@REVISION][:SPLIT], such as hf://openai/gsm8k/main:train",
        )
    require("huggingface_hub", text)
    name, config, revision, split = address.groups()
    folder = _download(text, name, revision, ["README.md"])
    names = _listing(text, name, folder)
    found = find_files(names, lambda item: read_plain(folder / item), text)
    files = found.files(config, split, wanted)
    folder = _download(text, name, folder.name, files)
    missing = [item for item in files if not (folder / item).is_file()]
    if missing:
        raise TaskFileError(
            f"{text}: the file {missing[0]} is not in the cache", hint="load it with network once"
        )
    sha = folder.name
    pinned = "" if revision else f"; {HUB}{name}{'/' + config if config else ''}@{sha[:10]} stays with it"
    logger.info("%s is revision %s%s", text, sha[:10], pinned)
    source = open_tables([folder / item for item in files], Path(text), folder=folder)
    source.is_trusted = False
    return source


def _listing(text: str, name: str, folder: Path) -> Sequence[str]:
    """Return the files of the commit in ``folder``: of the repository, or of the cache without network."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        info = HfApi().dataset_info(name, revision=folder.name, timeout=_SECONDS)
    except HfHubHTTPError as error:
        raise _refused(text, error) from error
    except (OSError, httpx2.TransportError):
        logger.warning("%s: the hub cannot be reached; its cache is read", text)
        return [item.relative_to(folder).as_posix() for item in sorted(folder.rglob("*")) if item.is_file()]
    return sorted(item.rfilename for item in info.siblings or ())


def _download(text: str, name: str, revision: str | None, files: Sequence[str]) -> Path:
    """Download files of a revision; return its folder in the cache, which is named by the commit."""
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                name,
                repo_type="dataset",
                revision=revision,
                etag_timeout=_SECONDS,
                allow_patterns=list(files),
            )
        )
    except (OSError, ValueError, httpx2.TransportError) as error:
        raise _refused(text, error) from error


def _refused(text: str, error: Exception) -> TaskFileError:
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    unreached = (LocalEntryNotFoundError, OfflineModeIsEnabled, httpx2.TransportError, ConnectionError)
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, HfHubHTTPError):
        error = error.__cause__  # the hub has answered
    if isinstance(error, unreached) and not isinstance(error, HfHubHTTPError):
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        return TaskFileError(
            f"{text} cannot be downloaded: {why}, and it is not in this machine's cache",
            hint="check the network and HF_ENDPOINT, or download its files elsewhere and give their folder",
        )
    reason = " ".join(str(error).split())[:300]
    return TaskFileError(
        f"{text} cannot be downloaded: {reason}",
        hint="check the name and the revision; a private or gated data set needs HF_TOKEN",
    )
