"""Write, read, list and delete the folders of versions: a local folder, or a bucket or server through fsspec.

A location is an absolute path, or a URL whose scheme is in ``SCHEMES``. Credentials and endpoints come from
the environment or fsspec's configuration, never from the URL: the database and the logs have it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from agentrl.base.atomic_folder import delete_folder
from agentrl.base.batches import batches
from agentrl.base.concurrency import Backoff
from agentrl.base.installation import require
from agentrl.base.proxies import proxy_of
from agentrl.documents.run import FileChecksum
from agentrl.errors import ConfigError, PublishError
from agentrl.weights.folder import MANIFEST

log = logging.getLogger(__name__)
T = TypeVar("T")

SCHEMES = {"s3": "s3fs", "gs": "gcsfs", "http": "aiohttp", "https": "aiohttp"}
"""Schemes of URLs, and the package that each needs beside fsspec."""
OUTAGE_SECONDS = 300.0
"""How long a call is repeated while the storage does not answer."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 15.0
_CALL_SECONDS = 60.0
_LEAST_BYTES_PER_SECOND = 1 << 20
_PART_BYTES = 16 << 20
_MANIFEST_BYTES = 256 << 20
"""Most bytes of a manifest: some 150 for each tensor of a model."""
_NAME_BYTES = 200
_PARALLEL = 4
"""Files at a time, and parts of a file at a time."""


def is_remote(location: str) -> bool:
    """Return whether a location is a URL; else it is a path."""
    return "://" in location


def name_of(location: str) -> str:
    """Return the name of the folder or file at ``location``."""
    return location.rstrip("/").rpartition("/")[2]


def require_storage(location: str) -> None:
    """Raise ConfigError unless versions can be published to ``location``. Connects to nothing."""
    if not is_remote(location):
        return
    parts = urlsplit(location)
    if parts.scheme not in SCHEMES:
        raise ConfigError(
            f"{parts.scheme}:// cannot store weights", hint=f"give a folder, or {', '.join(SCHEMES)}"
        )
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(
            f"the URL of {parts.scheme}://{parts.hostname} holds credentials or parameters, and it is stored",
            hint="give them in the environment, such as AWS_ACCESS_KEY_ID, or in fsspec's configuration",
        )
    if not parts.hostname:
        raise ConfigError(f"{location} names no bucket or host", hint=f"give {parts.scheme}://NAME/FOLDER")
    require("fsspec", location)
    require(SCHEMES[parts.scheme], location)


async def upload(folder: Path, location: str, files: Sequence[FileChecksum]) -> None:
    """Copy the files of ``folder`` to a URL, several at a time, and its manifest last.

    Raises PublishError if a file cannot be written, after ``OUTAGE_SECONDS`` where that may be temporary.
    """
    await _parallel(lambda file: put(folder / file.name, f"{location}/{file.name}"), files)
    # Write it last: who finds the manifest finds every file that it lists.
    await put(folder / MANIFEST, f"{location}/{MANIFEST}")


async def put(source: Path, target: str) -> None:
    """Copy a file to a URL. Raises as ``upload``."""
    # Ask for PUT: fsspec uploads to web servers by POST unless it is told.
    options = {"method": "put"} if target.startswith("http") else {}

    def write_file() -> None:
        seconds = _CALL_SECONDS + source.stat().st_size / _LEAST_BYTES_PER_SECOND
        _call(target, "_put_file", str(source), target, seconds=seconds, **options)

    await _retried(target, write_file)


async def write(location: str, content: bytes) -> None:
    """Write a small file at a URL. Raises as ``upload``."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        await put(Path(file.name), location)


async def download(location: str, files: Sequence[FileChecksum], folder: Path) -> None:
    """Copy files of a location into ``folder``, each complete and with its checksum, or absent.

    Raises PublishError if one is missing, differs from its checksum, or cannot be read, after
    ``OUTAGE_SECONDS`` where that may be temporary. Raises OSError if ``folder`` cannot be written.
    """
    await _parallel(lambda file: _download(location, file, folder), files)


async def _download(location: str, file: FileChecksum, folder: Path) -> None:
    # Name the process: samplers of one host may load the same file at once.
    source, partial = _file_url(location, file.name), folder / f".{file.name}.{os.getpid()}.part"
    digest = hashlib.sha256()
    parts = [(start, min(start + _PART_BYTES, file.bytes)) for start in range(0, file.bytes, _PART_BYTES)]
    with partial.open("wb") as stream:

        def keep(data: bytes) -> None:
            digest.update(data)
            stream.write(data)

        # Read a few at a time, in order: the hash needs the order, and memory holds no more than these.
        for batch in batches(parts, _PARALLEL):
            for data in await asyncio.gather(*(_read_part(source, start, end) for start, end in batch)):
                await asyncio.to_thread(keep, data)
    if digest.hexdigest() != file.sha256:
        raise PublishError(f"{source} has the sha256 {digest.hexdigest()} instead of {file.sha256}")
    partial.replace(folder / file.name)


async def read(location: str) -> bytes:
    """Return the manifest at ``location``. Raises PublishError if it cannot be read, or is too large."""
    data = await _read(location, 0, _MANIFEST_BYTES + 1)
    if len(data) > _MANIFEST_BYTES:
        raise PublishError(f"{location} has more than {_MANIFEST_BYTES:,} bytes: it is not a manifest")
    return data


async def _read_part(location: str, start: int, end: int) -> bytes:
    data = await _read(location, start, end)
    if len(data) != end - start:
        raise PublishError(
            f"{location} has {len(data)} bytes from byte {start} on instead of {end - start}",
            hint="the file ends too early: was it uploaded completely?",
        )
    return data


async def _read(location: str, start: int, end: int) -> bytes:
    """Return the bytes from ``start`` to ``end`` of a file, or fewer if it ends before."""
    if not is_remote(location):
        return await _retried(location, lambda: _read_local(Path(location), start, end))
    if location.startswith("http"):
        return await _retried(location, lambda: _on_server(location, _get, location, start, end))
    data: bytes = await _retried(
        location, lambda: _call(location, "_cat_file", location, start=start, end=end)
    )
    return data


async def _get(system: Any, session: Any, url: str, start: int, end: int) -> bytes:
    """Return a part of a file of a web server, and read no more than that, whatever the server sends.

    fsspec's own request follows redirects to any host, and holds all that comes in memory.
    """
    options = {**system.kwargs, "allow_redirects": False}
    options["headers"] = {**options.get("headers", {}), "Range": f"bytes={start}-{end - 1}"}
    data = bytearray()
    async with session.get(system.encode_url(url), **options) as response:
        # Take it for the end: the range begins behind the last byte.
        if response.status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return b""
        system._raise_not_found_for_status(response, url)
        if target := response.headers.get("Location"):
            raise PublishError(f"{url} redirects to {target}", hint="publish to the URL that holds the files")
        if start and response.status != HTTPStatus.PARTIAL_CONTENT:
            raise _ignores_range(url, start, end)
        async for block in response.content.iter_any():
            data += block
            if len(data) > end - start:
                raise _ignores_range(url, start, end)
    return bytes(data)


def _ignores_range(url: str, start: int, end: int) -> PublishError:
    return PublishError(
        f"{url}: the server sends more than the bytes {start} to {end}",
        hint="a server of weights has to answer Range requests",
    )


def _read_local(path: Path, start: int, end: int) -> bytes:
    with path.open("rb") as stream:
        stream.seek(start)
        return stream.read(end - start)


def _file_url(location: str, name: str) -> str:
    """Return where the file ``name`` of a version is. Raises PublishError for one that leaves the folder."""
    is_plain = name not in ("", ".", "..") and name.isprintable() and not {"/", "\\"} & set(name)
    if not is_plain or len(name.encode()) > _NAME_BYTES:
        raise PublishError(f"{location} lists a file {name[:_NAME_BYTES]!r}, which is not a plain name")
    return f"{location}/{name}"


async def folder_names(root: str) -> list[str]:
    """Return the names of what ``root`` holds; none for a web server, which lists nothing."""
    if not is_remote(root):
        return await asyncio.to_thread(lambda: os.listdir(root) if os.path.isdir(root) else [])
    if root.startswith("http"):
        return []
    try:
        found = await _retried(root, lambda: _call(root, "_ls", root, detail=False))
    except PublishError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return []
        raise
    return [name_of(path) for path in found]


async def delete(location: str, files: Sequence[FileChecksum]) -> bool:
    """Delete the folder of a version; ``files`` are those that a web server is told to delete.

    Returns whether nothing is left. Otherwise logs why.
    """
    try:
        if not is_remote(location):
            await asyncio.to_thread(delete_folder, Path(location))
        elif location.startswith("http"):
            for name in (MANIFEST, *(file.name for file in files)):
                await asyncio.to_thread(_on_server, location, _delete, _file_url(location, name))
        else:
            await asyncio.to_thread(_call, location, "_rm", location, recursive=True)
    except FileNotFoundError:
        return True
    except Exception as error:  # noqa: BLE001 - see _retried
        log.warning("%s is not deleted: %s", location, error)
        return False
    return True


async def delete_file(location: str) -> None:
    """Delete a file of a folder or a bucket. One that is not there is no error; others are logged."""
    try:
        if is_remote(location):
            await asyncio.to_thread(_call, location, "_rm", location)
        else:
            await asyncio.to_thread(os.unlink, location)
    except FileNotFoundError:
        return
    except Exception as error:  # noqa: BLE001 - see _retried
        log.warning("%s is not deleted: %s", location, error)


async def _parallel(call: Callable[[FileChecksum], Awaitable[None]], files: Sequence[FileChecksum]) -> None:
    limit = asyncio.Semaphore(_PARALLEL)

    async def bounded(file: FileChecksum) -> None:
        async with limit:
            await call(file)

    await asyncio.gather(*map(bounded, files))


async def _retried(location: str, work: Callable[[], T]) -> T:
    """Return what ``work`` returns in a thread; repeat it while the storage does not answer."""
    deadline = time.monotonic() + OUTAGE_SECONDS
    backoff = Backoff(location, _FIRST_PAUSE, _LONGEST_PAUSE, jitter=0.5)
    while True:
        try:
            return await asyncio.to_thread(work)
        except (FileNotFoundError, PermissionError) as error:
            raise PublishError(
                f"{location}: {error}", hint="does the URL exist, and may this user?"
            ) from error
        except (PublishError, TypeError, AttributeError, NotImplementedError):
            raise  # a wrong answer, or a defect here or in the package: no outage
        except Exception as error:  # packages of storages have no common error
            reason = str(error) or type(error).__name__
            if time.monotonic() + backoff.next() > deadline:
                raise PublishError(
                    f"{location} did not answer for {OUTAGE_SECONDS:g} s: {reason}",
                    hint="is the storage up, and are the endpoint and the credentials right?",
                ) from error
            if backoff.attempts == 1:
                log.warning("%s does not answer, retrying for %g s: %s", location, OUTAGE_SECONDS, reason)
        await asyncio.sleep(backoff.seconds)


def _call(location: str, method: str, /, *args: Any, seconds: float = _CALL_SECONDS, **options: Any) -> Any:
    """Call an async method of the file system of ``location``, and cancel it after ``seconds``."""
    from fsspec.asyn import sync

    system = _file_system(location)
    return sync(system.loop, getattr(system, method), *args, timeout=seconds, **options)


def _file_system(location: str) -> Any:
    """Return the file system of ``location``. The packages of buckets read the environment's proxies."""
    scheme = urlsplit(location).scheme
    return _system(scheme, proxy_of(location) if scheme in ("http", "https") else None)


@cache
def _system(scheme: str, proxy: str | None) -> Any:
    import fsspec

    options = {} if proxy is None else {"client_kwargs": {"proxy": proxy}}
    # Cache no listing: other hosts publish and delete meanwhile.
    return fsspec.filesystem(scheme, use_listings_cache=False, **options)


def _on_server(location: str, call: Callable[..., Awaitable[T]], /, *args: Any) -> T:
    """Return ``call(system, session, *args)`` of the web server of ``location``; cancel it in the end."""
    from fsspec.asyn import sync

    system = _file_system(location)

    async def work() -> T:
        return await call(system, await system.set_session(), *args)

    result: T = sync(system.loop, work, timeout=_CALL_SECONDS)
    return result


async def _delete(system: Any, session: Any, url: str) -> None:
    async with session.delete(system.encode_url(url)) as response:
        if response.status not in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE):
            response.raise_for_status()
