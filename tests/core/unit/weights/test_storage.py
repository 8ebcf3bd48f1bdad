"""The storage of versions: a folder, an S3 bucket and a web server behave alike; outages are bounded."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_store import FakeStore
from s3_here import s3_folder
from safetensors.torch import load_file, save_file

from agentrl.base.atomic_folder import begin_folder
from agentrl.documents.run import FileChecksum, PolicyVersion
from agentrl.errors import ConfigError, PublishError
from agentrl.weights import storage
from agentrl.weights.delta import encode
from agentrl.weights.folder import MANIFEST, TensorChecksum, checksums, write_manifest
from agentrl.weights.local_copy import LocalCopy
from agentrl.weights.publish import PublishTarget, publish
from agentrl.weights.snapshot import Written
from agentrl.weights.storage import delete, download, folder_names, read, require_storage, upload


class _Handler(SimpleHTTPRequestHandler):
    """A folder that can be written, as a WebDAV server serves it."""

    def log_message(self, *args: object) -> None:
        pass

    def do_PUT(self) -> None:
        path = Path(self.translate_path(self.path))
        path.parent.mkdir(parents=True, exist_ok=True)
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        path.write_bytes(data)
        self.send_response(201)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_DELETE(self) -> None:
        Path(self.translate_path(self.path)).unlink(missing_ok=True)
        self.send_response(204)
        self.end_headers()

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()
        wanted = self.headers.get("Range")
        if wanted:
            first, last = wanted.removeprefix("bytes=").split("-")
            data = data[int(first) : int(last) + 1]
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def served(handler: Any) -> Iterator[str]:
    """The URL of a server while the block runs."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.handle_error = lambda *args: None  # type: ignore[method-assign]  # a client may hang up
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/run"
    server.shutdown()
    server.server_close()


@pytest.fixture
def web_root(tmp_path: Path) -> Iterator[str]:
    with served(partial(_Handler, directory=str(tmp_path / "web"))) as url:
        yield url


@pytest.fixture
def s3_root(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with s3_folder(monkeypatch) as url:
        yield url


@pytest.fixture(params=["folder", "s3", "http"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "published")
    return str(request.getfixturevalue({"s3": "s3_root", "http": "web_root"}[request.param]))


@pytest.fixture
def source(root: str, tmp_path: Path) -> Path:
    """The folder of a version, in ``root`` where that is a folder."""
    folder = Path(root if root.startswith("/") else tmp_path) / "v000007"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    (folder / "empty.json").write_bytes(b"")
    write_manifest(folder, version=7)
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "copy").mkdir()
    return tmp_path / "copy"


async def test_a_version_returns_bit_by_bit(
    root: str, source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_PART_BYTES", 1000)
    files, location = checksums(source), f"{root}/v000007"
    if not root.startswith("/"):
        await upload(source, location, files)
    await download(location, files, target)
    assert checksums(target) == files
    assert not [name for name in os.listdir(target) if name.startswith(".")]
    assert await read(f"{location}/{MANIFEST}") == (source / MANIFEST).read_bytes()
    assert await folder_names(root) == ([] if root.startswith("http") else ["v000007"])
    await delete(location, files)
    assert await folder_names(root) == []
    with pytest.raises(PublishError, match=r"model\.safetensors"):
        await download(location, files, target)
    assert checksums(target) == files


async def test_versions_are_published_followed_and_pruned_there(root: str, tmp_path: Path) -> None:
    store: Any = FakeStore()
    store.attempt = 1
    weights = {"w": torch.zeros(100)}
    copy = LocalCopy(tmp_path / "copy")
    target = PublishTarget(root=root, attempt=1, keep=2)
    version: PolicyVersion | None = None
    for step in range(1, 7):
        before, weights = weights, weights | {"w": weights["w"] + torch.arange(100).eq(step)}
        temporary = begin_folder(tmp_path / "published" / "step")
        is_full = step in (1, 4)
        if is_full:
            save_file(weights, temporary / "model.safetensors")
        else:
            encode(before, weights, temporary / "rank-0.delta")
        written = Written(checksums(temporary), {"w": TensorChecksum.of(weights["w"])})
        version = await publish(
            store, temporary, written, target, step=step, train_step_id=None,
            base=None if version is None or is_full else version.id,
        )  # fmt: skip
        assert version.location == f"{root}/{storage.name_of(version.location)}"
        held, folder = await copy.hold(store, await copy.bring(store, version))
        assert held == version
        assert load_file(f"{folder}/model.safetensors")["w"].equal(weights["w"])
        copy.release()
    pruned = [number for number, each in store.versions.items() if each.pruned_at is not None]
    assert pruned == [0, 1, 2]  # 4 and 5 are kept, and 5 is a delta of 4
    assert not list((tmp_path / "published").glob(".tmp-*"))
    for number, each in store.versions.items():
        with pytest.raises(PublishError, match="manifest") if number in pruned else nullcontext():
            await read(f"{each.location}/{MANIFEST}")


async def test_a_file_with_other_bytes_is_not_kept(root: str, source: Path, target: Path) -> None:
    files = checksums(source)
    (source / "model.safetensors").write_bytes(b"x" * 256 * 40)
    if not root.startswith("/"):
        await upload(source, f"{root}/v000007", files)
    with pytest.raises(PublishError, match="instead of"):
        await download(f"{root}/v000007", files, target)
    assert not (target / "model.safetensors").exists()


async def test_an_outage_is_bridged_and_its_end_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(storage, "_LONGEST_PAUSE", 0.05)
    answers = [OSError("refused"), TimeoutError(), b"x"]

    def call(*args: object, **options: object) -> bytes:
        answer = answers.pop(0) if answers else OSError("refused")
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(storage, "_call", call)
    assert await read("s3://weights/x") == b"x"
    monkeypatch.setattr(storage, "OUTAGE_SECONDS", 0.2)
    async with asyncio.timeout(5):
        with pytest.raises(PublishError, match=r"did not answer for 0\.2 s: refused"):
            await read("s3://weights/x")


class _Careless(_Handler):
    """A server that ignores Range, redirects, or never ends."""

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        self.send_response({"moved.bin": 302, "late.bin": 206}.get(name, 200))
        if name == "moved.bin":
            self.send_header("Location", "http://127.0.0.1:1/secret")
        self.end_headers()
        while name in ("endless.bin", MANIFEST):
            self.wfile.write(bytes(1 << 16))
        self.wfile.write(b"x" * 10)


@pytest.fixture
def careless_root(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(storage, "_MANIFEST_BYTES", 1 << 20)
    monkeypatch.setattr(storage, "_PART_BYTES", 8)
    with served(_Careless) as url:
        yield url


@pytest.mark.attack
@pytest.mark.parametrize(
    ("name", "size", "says"),
    [
        ("endless.bin", 8, "the server sends more than the bytes 0 to 8"),
        ("whole.bin", 10, "the server sends more than the bytes"),
        ("late.bin", 4, "the server sends more than the bytes 0 to 4"),
        ("moved.bin", 8, "redirects to http://127.0.0.1:1/secret"),
        *((name, 8, "not a plain name") for name in ("..", "", "a/b", "..\\x", "a\0b", "\ud800", "x" * 300)),
    ],
)
async def test_what_a_server_of_weights_sends_is_bounded(
    name: str, size: int, says: str, careless_root: str, tmp_path: Path
) -> None:
    async with asyncio.timeout(10):
        with pytest.raises(PublishError, match=says):
            await download(careless_root, [FileChecksum(name=name, bytes=size, sha256="0" * 64)], tmp_path)


@pytest.mark.attack
async def test_a_manifest_without_end_is_not_read(careless_root: str) -> None:
    async with asyncio.timeout(10):
        with pytest.raises(PublishError, match="sends more than the bytes"):
            await read(f"{careless_root}/{MANIFEST}")


@pytest.mark.parametrize(
    "url", ["s3://me:secret@host/x", "https://h/x?X-Amz-Signature=secret", "ftp://host/x", "s3:///x"]
)
def test_a_url_with_credentials_or_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        require_storage(url)
    assert "secret" not in str(refused.value)


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    require_storage("/a/folder")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "gcsfs" else object())
    with pytest.raises(ConfigError) as refused:
        require_storage("gs://bucket/run")
    assert str(refused.value.hint).endswith("requirements/gcs.txt")
