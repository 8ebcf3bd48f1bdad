"""A run as a folder and back, byte by byte, verified, refused where it does not fit; and as Parquet."""

from __future__ import annotations

import dataclasses
import io
import json
import lzma
import os
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import bson
import pytest
import small_run as run
from bson.int64 import Int64
from db_command import agentrl_db

from agentrl.config.schema import RunConfig
from agentrl.documents.model_call import pack_ids
from agentrl.documents.run import flags_key
from agentrl.documents.task import Task, task_key
from agentrl.errors import ConfigError, StoreError
from agentrl.lab import transfer
from agentrl.lab.transfer import MANIFEST, Transfer, encode_line, read_lines, read_manifest
from agentrl.store.client import Store, open_connection, open_existing, open_store
from agentrl.store.mechanics.connection import SCHEMA_VERSION
from agentrl.store.schema import INDEXES, VIEWS

pytestmark = pytest.mark.integration

AWKWARD: list[dict[str, Any]] = [
    {"_id": 1, "int": 5, "long": Int64(5), "big": 2**40, "double": 5.0, "nan": float("nan"), "zero": -0.0},
    {"_id": "line\nbreak\u2028\u0000", "bytes": b"\x00\xff", "none": None, "list": [1, 2.0, "3"]},
    {"_id": bson.ObjectId(), "schema": {"$ref": "#/$defs/x", "$defs": {"x": {}}}},
    {"_id": 2, "arguments": {"$date": "tomorrow"}, "more": {"$numberInt": "7"}, "id": {"$oid": "no"}},
    {"_id": 3, "bson": "a field of that name", "ref": {"$ref": "c", "$id": 3}},
]


@pytest.fixture
async def vacant(run_config: RunConfig) -> AsyncIterator[RunConfig]:
    """A run name that no database has, on the same server; its database is dropped afterwards."""
    config = dataclasses.replace(run_config, run_name=f"test_{uuid.uuid4().hex[:12]}")
    yield config
    connection = await open_connection(config)
    await connection.client.drop_database(config.run_name)
    await connection.close()


def question(number: int) -> Task:
    return Task(
        id=task_key("train", 0, str(number)), task_id=str(number), split="train", epoch=0, order=number,
        query="what?", meta={"$date": "a key like a type"},
    )  # fmt: skip


async def fill(store: Store) -> None:
    await store.tasks.load([question(number) for number in range(1203)])
    await store.database["Extra"].insert_many(AWKWARD)
    chunks = [
        {"_id": bson.ObjectId(), "files_id": "f", "n": n, "data": pack_ids(range(60_000))} for n in range(3)
    ]
    await store.database["DBRecordData.packed.chunks"].insert_many(chunks)


async def load(config: RunConfig, folder: Path) -> None:
    connection = await open_connection(config)
    try:
        await Transfer(connection).load(folder)
    finally:
        await connection.close()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("document", AWKWARD)
def test_every_document_comes_back_byte_by_byte(document: dict[str, Any], tmp_path: Path) -> None:
    raw = bson.encode(document)
    (tmp_path / "x").write_bytes(2 * encode_line(raw))
    assert list(read_lines(tmp_path / "x")) == [raw, raw]


@pytest.mark.parametrize("compress", [False, True])
async def test_export_import_export_is_byte_identical(
    store: Store, vacant: RunConfig, tmp_path: Path, compress: bool
) -> None:
    await fill(store)
    manifest = await Transfer(store.connection).export(tmp_path / "first", compress=compress)
    assert {item.file.endswith(".xz") for item in manifest.collections} == {compress}
    counts = {item.collection: item.documents for item in manifest.collections}
    assert (counts["Task"], counts["Extra"], counts["Record"]) == (1203, len(AWKWARD), 0)
    await load(vacant, tmp_path / "first")
    async with await open_existing(vacant) as copy:
        second = await Transfer(copy.connection).export(tmp_path / "second", compress=compress)
        originals = [raw async for raw in store.database["Extra"].find(sort=[("_id", 1)])]
        copies = [raw async for raw in copy.database["Extra"].find(sort=[("_id", 1)])]
        assert str(originals) == str(copies)
        for name, indexes in INDEXES.items():
            stored = [index async for index in await copy.database[name].list_indexes()]
            assert len(stored) == len(indexes) + 1
        chunks = await copy.database["DBRecordData.packed.chunks"].index_information()
        assert chunks["files_id_1_n_1"]["unique"]
        views = await copy.database.list_collection_names(filter={"type": "view"})
        assert set(VIEWS.known()) <= set(views)
        copied = (await copy.database["Task"].options())["validator"]
        assert copied == (await store.database["Task"].options())["validator"]
    assert second == manifest
    assert contents(tmp_path / "first") == contents(tmp_path / "second")
    assert not any("partial" in name for name in os.listdir(tmp_path))


async def test_a_changed_file_is_refused_before_anything_is_written(
    store: Store, vacant: RunConfig, tmp_path: Path
) -> None:
    await fill(store)
    folder = tmp_path / "run"
    await Transfer(store.connection).export(folder)
    data = (folder / "Task.jsonl").read_bytes()
    for harm in (data.replace(b"A", b"B", 1), data[:-10], b""):
        (folder / "Task.jsonl").write_bytes(harm)
        with pytest.raises(StoreError, match=r"Task.jsonl differs from manifest.json"):
            await load(vacant, folder)
    (folder / "Task.jsonl").unlink()
    with pytest.raises(StoreError, match="cannot be read"):
        await load(vacant, folder)
    with pytest.raises(StoreError, match="there is no run"):
        await open_existing(vacant)
    with pytest.raises(StoreError, match="cannot be read"):
        await load(vacant, tmp_path / "nothing")


async def test_a_manifest_of_something_else_is_refused(
    store: Store, vacant: RunConfig, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    await Transfer(store.connection).export(folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    first = manifest["collections"][0]
    for change, message in (
        ({"schema": 99}, "schema version 99"),
        ({"schema": "8"}, "schema is '8'; it must be a whole number"),
        ({"schema": 0}, "schema is 0; it must be above 0"),
        ({"schema": -1}, "schema is -1; it must be above 0"),
        ({"schema": True}, "schema is True; it must be a whole number"),
        ({"schema": 10**400}, "schema version 1000"),
        ({"format": 1.5}, "format is 1.5; it must be a whole number"),
        ({"collections": [{**first, "file": "../x"}]}, r"\[0\].file is '../x'; it must be \w+.jsonl"),
        ({"collections": [{**first, "collection": "system.js", "file": "system.js.jsonl"}]}, "'system.js'"),
        ({"collections": [{**first, "collection": 5}]}, r"\[0\].collection is 5; it must be text"),
        ({"collections": [first, first]}, "a collection twice"),
        ({"collections": [{**first, "documents": -1}]}, "documents is -1; it must be at least 0"),
        ({"collections": [{**first, "bytes": "5"}]}, "bytes is '5'"),
        ({"collections": [{**first, "sha256": None}]}, "sha256' is missing"),
        ({"collections": [{**first, "sha256": "5" * 63}]}, "sha256 is '5{63}'; it must be 64 hex digits"),
        ({"collections": [{**first, "mode": 7}]}, r"unknown key 'collections\[0\].mode'"),
        ({"collections": 7}, "not the manifest"),
    ):
        (folder / MANIFEST).write_text(json.dumps({**manifest, **change}))
        with pytest.raises(StoreError, match=message):
            read_manifest(folder)

    for text in ("[" * 200_000, "5", "[]", '{"schema": NaN}'):
        (folder / MANIFEST).write_text(text)
        with pytest.raises(StoreError, match="not the manifest of an export"):
            read_manifest(folder)


async def test_a_compressed_file_that_is_damaged_or_larger_than_it_says_is_refused(
    store: Store, vacant: RunConfig, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    await Transfer(store.connection).export(folder, compress=True)
    file = folder / "Run.jsonl.xz"
    data = file.read_bytes()
    for harm, problem in (
        (data[:-10], "cannot be read: Compressed file ended"),
        (b"x" + data, "cannot be read: Input format not supported"),
        (lzma.compress(bytes(2**24)), f"differs from manifest.json: {2**20} bytes"),
    ):
        file.write_bytes(harm)
        with pytest.raises(StoreError, match=rf"Run.jsonl.xz {problem}"):
            await load(vacant, folder)


@pytest.mark.parametrize(
    "line",
    [
        b'{"_id":' + b"9" * 311 + b"}",
        b'{"_id":' + b"9" * 5000 + b"}",
        b'{"_id":1,"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"_id":"\\ud800"}',
        b'{"bson":1000000000000000}',
        b'{"bson":{"$binary":{"base64":"AAAA","subType":"00"}}}',
        b"[1]",
    ],
)
def test_a_line_that_no_export_wrote_is_named(line: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(6 * encode_line(bson.encode({"_id": 1})) + line + b"\n")
    with pytest.raises(StoreError, match=r"x, line 7, is not a document in canonical extended JSON"):
        list(read_lines(tmp_path / "x"))


@pytest.mark.attack
async def test_functions_that_an_export_names_are_not_imported_unless_allowed(
    store: Store, vacant: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await store.imports.add(["evil.scorer:run"])
    harmless = {"loss_calculater": "GRPO", "output_dir": "output/x", "trust_remote_code": False}
    for role, changed in (
        ("sample", {}), ("train", {"loss_calculater": "evil:loss"}), ("serve", {"trust_remote_code": True}),
    ):  # fmt: skip
        await store.settings.begin(flags_key(role), harmless | changed, role)
    await Transfer(store.connection).export(tmp_path / "run")
    assert await agentrl_db(vacant, "import", str(tmp_path / "run")) == 0
    said = capsys.readouterr().out
    assert "left out: Imports, by which samplers would use evil.scorer:run" in said
    assert "they name code: loss_calculater evil:loss, trust_remote_code True;" in said
    async with await open_store(vacant) as copy:
        assert not await copy.imports.paths()
        assert set(await copy.settings.resolved()) == {"sample"}
        await copy.connection.client.drop_database(vacant.run_name)
    assert await agentrl_db(vacant, "import", str(tmp_path / "run"), "--allow_modules") == 0
    async with await open_store(vacant) as copy:
        assert await copy.imports.paths() == {"evil.scorer:run"}
        assert set(await copy.settings.resolved()) == {"sample", "train", "serve"}


async def test_a_database_that_holds_something_is_refused(
    store: Store, run_config: RunConfig, tmp_path: Path
) -> None:
    await fill(store)
    await Transfer(store.connection).export(tmp_path / "run")
    with pytest.raises(StoreError, match=f"{run_config.run_name}.* is not empty: it holds"):
        await load(run_config, tmp_path / "run")
    with pytest.raises(StoreError, match="is not empty"):
        await Transfer(store.connection).export(tmp_path / "run")


async def test_an_import_that_was_interrupted_is_no_run_and_is_begun_again(
    store: Store, vacant: RunConfig, tmp_path: Path
) -> None:
    await fill(store)
    folder = tmp_path / "run"
    await Transfer(store.connection).export(folder)
    connection = await open_connection(vacant)
    await connection.database["Run"].insert_one(
        {"_id": "schema", "version": SCHEMA_VERSION, "importing": True}
    )
    await connection.database["Task"].insert_one({"_id": "half"})
    await connection.close()
    for opening in (open_store, open_existing):
        with pytest.raises(StoreError, match="did not finish"):
            await opening(vacant)
    await load(vacant, folder)
    async with await open_store(vacant) as copy:
        assert await copy.database["Task"].count_documents({}) == 1203
        schema = await store.database["Run"].find_one({"_id": "schema"})
        assert await copy.database["Run"].find_one({"_id": "schema"}) == schema


async def test_the_export_shows_one_moment(store: Store, tmp_path: Path) -> None:
    await fill(store)
    transfer = Transfer(store.connection)
    pages = transfer._pages

    async def disturbed(name: str, session: Any) -> AsyncIterator[Any]:
        async for document in pages(name, session):
            await store.database["Task"].delete_many({})
            yield document

    transfer._pages = disturbed  # type: ignore[method-assign]
    manifest = await transfer.export(tmp_path / "run")
    assert {item.collection: item.documents for item in manifest.collections}["Task"] == 1203


async def test_the_scored_trajectories_become_rows(
    store: Store, run_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    monkeypatch.setattr(transfer, "_ROW_GROUP", 2)
    await run.build(store, tmp_path / "weights")
    calls = [{"function": {"name": "add", "arguments": {"a": 2}}}]
    change = {"$set": {"response.tool_calls": calls, "response.content": [{"type": "text", "text": "é!"}]}}
    await store.database["DispatchedSamplingTask"].update_one({"_id": f"{run.TRAINED}/0/2/0"}, change)
    folder = tmp_path / "dataset"
    assert await agentrl_db(run_config, "export", str(folder), "--hf") == 0
    rows = {row["id"]: row for row in parquet.read_table(folder / "data/train.parquet").to_pylist()}
    assert len(rows) == 6
    row = rows[f"{run.TRAINED}/0/2"]
    names = ("task_id", "split", "score", "status", "trained", "trained_at_steps", "min_policy_version")
    assert tuple(row[name] for name in names) == ("trained", "train", 0.0, "trained", True, [1], 0)
    roles = [message["role"] for message in row["messages"]]
    assert roles == ["user", "assistant", "user", "assistant"]
    assert row["messages"][1]["content"] == "é!"
    assert json.loads(row["messages"][1]["tool_calls"]) == calls
    assert (rows[f"{run.READY}/0/1"]["status"], rows[f"{run.READY}/0/1"]["trained"]) == ("ready", False)
    assert "data_files: data/train.parquet" in (folder / "README.md").read_text()
    with pytest.raises(StoreError, match="not empty"):
        await agentrl_db(run_config, "export", str(folder), "--hf")


async def test_without_pyarrow_the_extra_is_named(
    store: Store, run_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError) as caught:
        await agentrl_db(run_config, "export", str(tmp_path / "dataset"), "--hf")
    assert "requirements/parquet.txt" in str(caught.value.hint)
    assert not (tmp_path / "dataset").exists()


def test_rows_with_gaps_become_a_table() -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    content = io.BytesIO()
    transfer.write_parquet([{"step": 1, "reward": None}, {"step": 2, "reward": 0.5}], content)
    assert parquet.read_table(io.BytesIO(content.getvalue())).to_pylist()[1] == {"step": 2, "reward": 0.5}
