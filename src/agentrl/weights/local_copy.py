"""Keep a copy of a version on the engines' host, shared by all its engines, and follow versions by deltas.

The copy is an ordinary Hugging Face folder, ``ROOT/model``, changed in place. ``ROOT/lock`` is held
exclusively while it changes, and shared while an engine reads it. ``ROOT/state.json`` says what it holds, and
what was being applied when its last writer ended: deltas hold absolute values, so the same ones applied again
complete it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import logging
import math
import os
import shutil
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from agentrl.base.atomic_folder import replace_file
from agentrl.base.folder_owner import hold_cache
from agentrl.documents.run import FileChecksum, PolicyVersion
from agentrl.documents.status import VersionStatus
from agentrl.errors import ModelError, PublishError, first_line
from agentrl.weights import storage
from agentrl.weights.delta import CHUNK, LENGTH, SUFFIX, WORDS, DeltaChunk, DeltaFile, StoredShape
from agentrl.weights.folder import (
    MANIFEST,
    WEIGHT_SUFFIXES,
    TensorChecksum,
    new_checksum,
    read_header,
    verify,
    weights_digest,
)

if TYPE_CHECKING:
    from agentrl.store.client import Store


def apply(
    deltas: Sequence[Path], folder: Path, expected: Mapping[str, TensorChecksum], threads: int = 2
) -> list[str]:
    """Write the values of ``deltas``, oldest first, into the safetensors files of ``folder``, in place.

    Each changed tensor is read, changed, hashed and written once, a chunk at a time. Return the names of the
    changed tensors. Raises PublishError if a delta is damaged or does not fit the folder, or if a tensor then
    differs from ``expected``, the checksums of the last delta's version; the folder holds neither version
    then. Raises OSError if a file cannot be read or written.
    """
    with contextlib.ExitStack() as files, ThreadPoolExecutor(threads) as pool:
        opened = [DeltaFile(files.enter_context(path.open("rb")), path) for path in deltas]
        places = _places(folder)
        names = sorted({name for delta in opened for name in delta.index})
        lacking = next((name for name in names if name not in places), None)
        if lacking is not None:
            raise PublishError(f"{folder} has no tensor {lacking}, which {deltas[-1]} changes")
        # Check the index of every delta before the first byte of the copy changes.
        patches = {
            name: [(delta, delta.chunks(name, places[name])) for delta in opened if name in delta.index]
            for name in names
        }
        unknown = TensorChecksum("", (), "")
        found = pool.map(
            lambda name: _change_tensor(places[name], patches[name], expected.get(name, unknown)), names
        )
        for name, checksum in zip(names, found, strict=True):
            if checksum != expected.get(name):
                raise PublishError(
                    f"tensor {name} in {folder} differs from what was published: expected "
                    f"{expected.get(name)}, found {checksum}"
                )
    return names


@dataclass(frozen=True, slots=True)
class _InFile(StoredShape):
    """Where the bytes of a tensor are in a safetensors file."""

    file: Path
    offset: int


def _places(folder: Path) -> dict[str, _InFile]:
    places = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with file.open("rb") as stream:
                begin = LENGTH.size + LENGTH.unpack(stream.read(LENGTH.size))[0]
            for name, entry in read_header(file).items():
                start, end = entry["data_offsets"]
                elements = math.prod(entry["shape"])
                word = WORDS[(end - start) // max(elements, 1) or 1]
                if elements * word.itemsize != end - start or begin + end > file.stat().st_size:
                    raise ValueError(f"its tensor {name} is incomplete")
                places[name] = _InFile(entry["dtype"], tuple(entry["shape"]), word, file, begin + start)
        except (ModelError, ValueError, KeyError, TypeError, struct.error) as error:
            raise PublishError(f"{file} is not a safetensors file: {first_line(error)}") from error
    return places


def _change_tensor(
    place: _InFile, patches: Sequence[tuple[DeltaFile, Mapping[int, DeltaChunk]]], expected: TensorChecksum
) -> TensorChecksum:
    digest = new_checksum(expected.checksum)
    descriptor = os.open(place.file, os.O_RDWR)
    try:
        for number, start in enumerate(range(0, place.elements, CHUNK)):
            data = np.empty(min(CHUNK, place.elements - start), place.word)
            offset = place.offset + start * place.word.itemsize
            # Not mapped: a full disk and a truncated file are errors here, and SIGBUS there.
            read = os.preadv(descriptor, [data.data], offset)
            changes = [(delta, chunks[number]) for delta, chunks in patches if number in chunks]
            for delta, chunk in changes:
                positions, values = delta.read(chunk)
                data[positions] = values
            digest.update(data.data)
            written = os.pwrite(descriptor, data.data, offset) if changes else read
            if not read == written == data.nbytes:
                raise PublishError(f"{place.file} could not be changed at byte {offset}")
    finally:
        os.close(descriptor)
    return TensorChecksum(place.dtype, place.shape, digest.hexdigest())


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def _boot() -> str:
    """Return what identifies the time since the host was started: what was not on disk then is lost."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


@dataclass(frozen=True)
class CopyState:
    """What a copy holds: ``version``, in which the deltas ``applying`` may have been applied in part."""

    version: int | None = None
    identity: str | None = None
    applying: tuple[int, ...] = ()
    boot: str = field(default_factory=_boot)

    @classmethod
    def of(cls, version: PolicyVersion) -> CopyState:
        return cls(version.id, identity_of(version))

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> CopyState:
        """Return a stored state; nothing is held if the host was started again since."""
        state = cls(**(dict(value) | {"applying": tuple(value["applying"])}))
        return state if state.boot == _boot() else cls()

    def holds(self, version: PolicyVersion) -> bool:
        """Return whether ``version`` was the last one that was whole; deltas may be half applied to it."""
        return (self.version, self.identity) == (version.id, identity_of(version))

    def is_whole(self, version: PolicyVersion) -> bool:
        """Whether ``version`` is held, and nothing else."""
        return self.holds(version) and not self.applying

    def rest_of(self, chain: list[PolicyVersion]) -> list[PolicyVersion]:
        """Return the deltas of ``chain`` that lead on from what is held; all of it if none do."""
        held = next((place for place, step in enumerate(chain) if self.holds(step)), None)
        rest = [] if held is None else chain[held + 1 :]
        leads_on = rest and tuple(step.id for step in rest)[: len(self.applying)] == self.applying
        return rest if leads_on else chain


def identity_of(version: PolicyVersion) -> str:
    files = "".join(f"{file.name}:{file.sha256}\n" for file in version.files)
    return version.digest or hashlib.sha256(files.encode()).hexdigest()


log = logging.getLogger(__name__)
T = TypeVar("T")

LOCK_SECONDS = 900.0
"""How long to wait for the lock. An engine may hold it while it starts."""
_MESSAGE_SECONDS = 10.0
_POLL_SECONDS = 0.05
_KEPT_ADAPTERS = 8
_MOST_COPIES = 64
"""Of a host, for processes that each have their own."""
_NAME_LENGTH = 8


async def weights_dir(store: Store, given: str | None) -> Path:
    """Return the folder of a host's copies of a run, held as its cache while this process lives.

    It is ``--weights_dir``/RUN, or ``.agentrl/weights/RUN``. Raises ConfigError if another run of the name
    uses it.
    """
    folder = Path(".agentrl/weights" if given is None else given) / store.run_name
    owner = await store.settings.owner()
    with contextlib.suppress(OSError):  # whole weights are loaded in place: a read-only folder may do
        await asyncio.to_thread(hold_cache, folder, owner, "--weights_dir")
    return folder


async def chain_to(store: Store, version: PolicyVersion) -> list[PolicyVersion]:
    """Return whole weights and the deltas that lead from there to ``version``, oldest first.

    Raises PublishError if one of them does not exist any more.
    """
    chain = [version]
    while chain[0].base is not None:
        base = await store.policy_versions.get(chain[0].base)
        if base is None or base.pruned_at is not None or base.id >= chain[0].id:
            raise PublishError(
                f"version {chain[0].id} is a delta of version {chain[0].base}, which is deleted"
            )
        chain.insert(0, base)
    return chain


def is_in_place(version: PolicyVersion) -> bool:
    """Return whether engines load ``version`` from its own folder: whole weights, not at a URL."""
    return version.encoding == "full" and not storage.is_remote(version.location)


class LocalCopy:
    """The copy in ``root``. An instance holds the lock between ``hold`` and ``release``."""

    def __init__(self, root: Path, *, is_exact: bool = False) -> None:
        """``is_exact``: never settle for another version than the wanted one.

        Such copies are not shared, because two processes that want two versions would undo each other's work:
        ``hold`` takes the first of ROOT, ROOT-2, ROOT-3, … that no other process has.
        """
        self._first = root.absolute()
        self._is_exact = is_exact
        self._lock: int | None = None
        self._place(self._first)

    def _place(self, root: Path) -> None:
        self._root, self.folder, self._deltas = root, root / "model", root / "deltas"

    async def bring(self, store: Store, wanted: PolicyVersion) -> PolicyVersion:
        """Make ``wanted`` ready to be loaded, and return what is.

        A version that is loaded in place is only verified. Else the copy then holds it; or a newer published
        version, if another engine has brought one; or an older one, with a log line, if a delta in between is
        damaged or missing. Raises PublishError if the copy cannot get closer to ``wanted``: it stays as it
        was, or is made again next time.
        """
        if is_in_place(wanted):
            await asyncio.to_thread(verify, wanted.location, wanted.files)
            return wanted
        await self._acquire(fcntl.LOCK_EX)
        try:
            return await self._bring(store, wanted)
        finally:
            self.release()

    async def hold(self, store: Store, wanted: PolicyVersion) -> tuple[PolicyVersion, str]:
        """Keep what ``bring`` returns from changing until ``release``; return it and its folder.

        It is brought if it is not there. A version that is loaded in place is not verified again. An exact
        copy may be held again without ``release``: it stays this instance's.
        """
        if is_in_place(wanted):
            return wanted, wanted.location
        if self._is_exact:
            await self._acquire(fcntl.LOCK_EX)
            try:
                await self._bring(store, wanted)
            except BaseException:
                self.release()
                raise
            return wanted, str(self._adapter(wanted) if wanted.encoding == "adapter" else self.folder)
        while True:
            await self._acquire(fcntl.LOCK_SH)
            if wanted.encoding == "adapter" and self._adapter(wanted).is_dir():
                return wanted, str(self._adapter(wanted))
            if self._state().is_whole(wanted):
                return wanted, str(self.folder)
            # Look again afterwards: between the two locks another engine may change the copy.
            wanted = await self.bring(store, wanted)

    async def hold_deltas(self, store: Store, wanted: PolicyVersion, since: int) -> list[Path]:
        """Return the files of the deltas from version ``since`` to ``wanted``, oldest first.

        There are none if deltas do not lead from there. They stay until ``release``, and the copy as it is.
        Raises PublishError if one is damaged or missing, or cannot be copied here.
        """
        chain = await chain_to(store, wanted)
        first = next((place for place, step in enumerate(chain, 1) if step.id == since), len(chain))
        # Lock alone, although the copy stays as it is: files are downloaded beside it.
        await self._acquire(fcntl.LOCK_EX)
        try:
            return [file for step in chain[first:] for file in await self._download_delta(step)]
        except OSError as error:
            raise self._unwritable(wanted, error) from error

    def _unwritable(self, wanted: PolicyVersion, error: OSError) -> PublishError:
        return PublishError(
            f"the copy of version {wanted.id} in {self._root} cannot be written: {error}",
            hint="free space there, or give another --weights_dir",
        )

    def _adapter(self, version: PolicyVersion) -> Path:
        return self._root / "adapters" / f"{version.id}-{identity_of(version)[:_NAME_LENGTH]}"

    async def _bring_adapter(self, version: PolicyVersion) -> None:
        folder = self._adapter(version)
        if not folder.is_dir():
            temporary = folder.with_name(f".{folder.name}")
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            await storage.download(version.location, version.files, temporary)
            # Rename it when it is complete: a folder that is there is taken for whole.
            temporary.rename(folder)
        by_age = sorted(folder.parent.glob("[0-9]*"), key=lambda path: int(path.name.partition("-")[0]))
        for old in by_age[:-_KEPT_ADAPTERS]:
            shutil.rmtree(old, ignore_errors=True)

    def release(self) -> None:
        """Release the lock; idempotent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def _acquire(self, kind: int) -> None:
        if self._is_exact:
            await self._take_free()
            return
        self.release()
        await asyncio.to_thread(self.folder.mkdir, parents=True, exist_ok=True)
        self._lock = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        started, is_told = time.monotonic(), False
        while True:
            try:
                # Poll: a thread that waits in flock could not be cancelled.
                fcntl.flock(self._lock, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                waited = time.monotonic() - started
                if waited > LOCK_SECONDS:
                    self.release()
                    raise PublishError(
                        f"another process of this host has locked {self._root} for {LOCK_SECONDS:g} s",
                        hint="end the engine that hangs, or give this one another --weights_dir",
                    ) from None
                if waited > _MESSAGE_SECONDS and not is_told:
                    is_told = True
                    log.warning("waiting for another engine of this host, which uses %s", self._root)
                await asyncio.sleep(_POLL_SECONDS)
            else:
                return

    async def _take_free(self) -> None:
        """Lock the first copy that no other process has. A killed one has none: the kernel frees its lock."""
        if self._lock is not None:
            return
        for number in range(1, _MOST_COPIES + 1):
            self._place(self._first if number == 1 else self._first.with_name(f"{self._first.name}-{number}"))
            await asyncio.to_thread(self.folder.mkdir, parents=True, exist_ok=True)
            lock = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(lock)
                if not isinstance(error, BlockingIOError):
                    raise
            else:
                self._lock = lock
                return
        raise PublishError(
            f"{_MOST_COPIES} processes of this host have copies of their own beside {self._first}",
            hint="end some of them, or give this one another --weights_dir",
        )

    async def _bring(self, store: Store, wanted: PolicyVersion) -> PolicyVersion:
        try:
            if wanted.encoding == "adapter":
                await self._bring_adapter(wanted)
                return wanted
            return await self._bring_weights(store, wanted)
        except OSError as error:
            raise self._unwritable(wanted, error) from error

    async def _bring_weights(self, store: Store, wanted: PolicyVersion) -> PolicyVersion:
        state = self._state()
        if state.is_whole(wanted):
            return wanted
        if state.version is not None and state.version > wanted.id and not self._is_exact:
            newer = await store.policy_versions.get(state.version)
            if newer is not None and newer.status is VersionStatus.PUBLISHED and state.is_whole(newer):
                return newer
        chain = await chain_to(store, wanted)
        steps = state.rest_of(chain)
        if steps is not chain:
            try:
                return await self._follow(steps, state)
            except PublishError as error:
                if not self._state().applying:  # nothing was changed, and the whole chain has the same gap
                    raise
                source = chain[0].id
                log.warning("%s is made again from version %d: %s", self._root, source, error.message)
        return await self._follow(chain, state)

    async def _follow(self, steps: Sequence[PolicyVersion], state: CopyState) -> PolicyVersion:
        """Apply the longest part of ``steps`` whose files exist; return its last version."""
        whole = [step for step in steps[:1] if step.base is None]
        reached, paths = list(whole), list[Path]()
        try:
            for step in steps[len(whole) :]:
                paths += await self._download_delta(step)
                reached.append(step)
        except PublishError as error:
            if not reached or self._is_exact or (not whole and len(reached) < len(state.applying)):
                raise
            missing = steps[len(reached)].id
            log.warning("version %d is taken, not %d: %s", reached[-1].id, missing, error.message)
        last = reached[-1]
        wanted, content = await _read_manifest(last)
        if whole:
            before, own = await _read_manifest(whole[0])
            # Record that nothing is held yet: a kill before the end leaves a mixture of two versions.
            self._write_state(CopyState())
            await self._replace(whole[0])
            replace_file(self.folder / MANIFEST, own)
            state = CopyState.of(whole[0])
        else:
            before = _tensors((self.folder / MANIFEST).read_bytes())
        if paths:
            applied = tuple(step.id for step in reached[len(whole) :])
            self._write_state(replace(state, applying=applied))
            changed = await to_its_end(apply, paths, self.folder, wanted)
            other = next((n for n in wanted.keys() - set(changed) if before.get(n) != wanted[n]), None)
            if other is not None or before.keys() != wanted.keys():
                raise PublishError(f"the deltas up to version {last.id} do not change tensor {other}")
        replace_file(self.folder / MANIFEST, content)
        self._write_state(CopyState.of(last))
        shutil.rmtree(self._deltas, ignore_errors=True)
        return last

    async def _download_delta(self, step: PolicyVersion) -> list[Path]:
        folder = self._deltas / str(step.id)
        folder.mkdir(parents=True, exist_ok=True)
        files = [file for file in step.files if file.name.endswith(SUFFIX)]
        await storage.download(step.location, await asyncio.to_thread(_missing, folder, files), folder)
        return [folder / file.name for file in files]

    async def _replace(self, full: PolicyVersion) -> None:
        """Make the copy hold the files of ``full`` alone; those that it has already are kept."""
        names = {file.name for file in full.files}
        for path in self.folder.iterdir():
            if path.name not in names:
                path.unlink()
        missing = await asyncio.to_thread(_missing, self.folder, full.files)
        await storage.download(full.location, missing, self.folder)

    def _state(self) -> CopyState:
        if not (self.folder / MANIFEST).is_file():
            return CopyState()
        try:
            return CopyState.from_json(json.loads((self._root / "state.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError):
            return CopyState()

    def _write_state(self, state: CopyState) -> None:
        replace_file(self._root / "state.json", json.dumps(asdict(state)).encode())


def _missing(folder: Path, files: Sequence[FileChecksum]) -> list[FileChecksum]:
    """Return those of ``files`` that ``folder`` lacks or has with other bytes."""
    missing = []
    for file in files:
        try:
            verify(folder, [file])
        except PublishError:
            missing.append(file)
    return missing


async def _read_manifest(version: PolicyVersion) -> tuple[dict[str, TensorChecksum], bytes]:
    """Return the checksums of the tensors of a version, checked against its digest, and their file."""
    content = await storage.read(f"{version.location}/{MANIFEST}")
    tensors = _tensors(content)
    if version.digest is not None and weights_digest(tensors) != version.digest:
        raise PublishError(f"{version.location}/{MANIFEST} does not belong to version {version.id}")
    return tensors, content


def _tensors(manifest: bytes) -> dict[str, TensorChecksum]:
    try:
        found = json.loads(manifest).get("tensors", {})
        return {name: TensorChecksum.from_json(value) for name, value in found.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise PublishError(f"{MANIFEST} is damaged: {error}") from error


async def model_files(store: Store, version: PolicyVersion, root: Path) -> str:
    """Return a folder with the configuration and the tokenizer of ``version``, if need be copied to ``root``.

    Raises PublishError if they cannot be read.
    """
    whole = (await chain_to(store, version))[0]
    if is_in_place(whole):
        return whole.location
    folder = root / "files" / f"{whole.id}-{identity_of(whole)[:_NAME_LENGTH]}"
    files = [file for file in whole.files if not file.name.endswith(WEIGHT_SUFFIXES)]
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    await storage.download(whole.location, await asyncio.to_thread(_missing, folder, files), folder)
    return str(folder)


async def to_its_end(work: Callable[..., T], *args: Any) -> T:
    """Run ``work`` in a thread; if this is cancelled, wait for its end first: it holds a lock or a model."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *args))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
