"""Images of task files: loaded once by hash, kept while something names them, refused with a reason."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image as Pillow
from tiny_vision import drawn

from agentrl.config.schema import SamplingConfig
from agentrl.documents.images import MAX_IMAGE_BYTES, content_with, image_of_bytes, image_refs, picture_of
from agentrl.documents.task_file import read_tasks
from agentrl.errors import ConfigError, ImageError, TaskFileError
from agentrl.lab.deletion import Retention
from agentrl.rollout.load_tasks import store_tasks
from agentrl.rollout.preflight import probe
from agentrl.store.client import Store
from agentrl.store.model_calls import Images

pytestmark = pytest.mark.integration


def write(folder: Path, *tasks: dict[str, Any]) -> Path:
    path = folder / "tasks.jsonl"
    path.write_text("\n".join(json.dumps({"id": f"t{i}", "query": "?", **t}) for i, t in enumerate(tasks)))
    return path


async def test_images_of_a_task_file_are_stored_once_and_kept_while_named(
    store: Store, tmp_path: Path
) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "red.png").write_bytes(drawn("red"))
    url = f"data:image/png;base64,{base64.b64encode(drawn('red')).decode()}"
    path = write(
        tmp_path,
        {"images": ["pictures/red.png"], "query": "Which?"},
        {"images": [url, "pictures/red.png"], "query": "<image> or <image>?"},
        {},
    )
    result = read_tasks(path, shuffle=False)
    await store_tasks(store, result)
    tasks = await store.tasks.find("train")
    red = image_of_bytes(drawn("red"))
    assert [[image.sha256 for image in task.images] for task in tasks] == [[red.id], [red.id, red.id], []]
    assert (await Images(store.connection).get([red.id]))[red.id].data == drawn("red")
    kinds = [part["type"] for part in content_with(tasks[1].query, tasks[1].images)]  # type: ignore[index]
    assert kinds == ["image", "text", "image", "text"]
    assert image_refs([{"content": content_with(tasks[0].query, tasks[0].images)}]) == [red.ref]

    noise = np.random.default_rng(0).integers(0, 255, (1800, 1800, 3), dtype=np.uint8)
    Pillow.fromarray(noise).save(tmp_path / "large.png")
    large = image_of_bytes((tmp_path / "large.png").read_bytes())
    assert 8 * 2**20 < len(large.data) <= MAX_IMAGE_BYTES
    await store.images.put(large)
    restored = (await Images(store.connection).get([large.id]))[large.id]
    assert picture_of(restored).size == (1800, 1800)

    retention = Retention(store.connection)
    assert (await retention.prune_images(dry_run=True))[0] == 0
    deleted, freed = await retention.prune_images(grace=-timedelta(minutes=1))
    assert deleted == 1
    assert freed > 0
    assert red.id in await Images(store.connection).get([red.id])
    with pytest.raises(ImageError, match="not stored"):
        await Images(store.connection).get([large.id])

    text_only = SimpleNamespace(
        name="template", vision=None, render=lambda messages, tools: [], decode=lambda ids: ""
    )
    tools = SimpleNamespace(list=lambda: [])
    with pytest.raises(ConfigError, match=r"(?s)nothing is claimed.*tasks show images.*reads text only"):
        await probe(store, cast(Any, tools), SamplingConfig(), "train", chat_format=cast(Any, text_only))


@pytest.mark.parametrize(
    ("images", "why"),
    [
        (["missing.png"], "cannot be read"),
        (["https://example.org/cat.png"], "not fetched from anywhere"),
        (["data:image/png;base64,AAAA"], "is not an image"),
        (["wide.png"], "200 times the other"),
        (["huge.png"], "at most"),
        ("red.png", "must be a list"),
    ],
)
def test_a_bad_image_is_a_bad_line(images: Any, why: str, tmp_path: Path) -> None:
    Pillow.new("RGB", (1000, 2)).save(tmp_path / "wide.png")
    Pillow.new("1", (9000, 9000)).save(tmp_path / "huge.png")
    with pytest.raises(TaskFileError, match=why):
        read_tasks(write(tmp_path, {"images": images}))


def test_what_readers_decode_differently_is_normalized(tmp_path: Path) -> None:
    """A rotated JPEG and a transparent PNG become upright RGB PNG; a plain PNG keeps its bytes."""
    assert image_of_bytes(drawn()).data == drawn()
    exif = Pillow.Exif()
    exif[0x0112] = 6
    Pillow.new("RGB", (30, 10), "red").save(tmp_path / "turned.jpg", exif=exif)
    turned = image_of_bytes((tmp_path / "turned.jpg").read_bytes())
    assert (turned.width, turned.height, turned.media_type) == (10, 30, "image/png")
    Pillow.new("RGBA", (4, 4), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    clear = image_of_bytes((tmp_path / "clear.png").read_bytes())
    assert picture_of(clear).getpixel((0, 0)) == (255, 255, 255)
    with pytest.raises(ImageError, match="other bytes"):
        picture_of(replace(clear, data=clear.data + b"x"))
