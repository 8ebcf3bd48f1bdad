"""Images in forests: merged and packed trajectories against each trajectory alone in the plain model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import plain_logprobs, tiny_model
from tiny_vision import IDS, VOCABULARY, drawn_image, save_vision_model, vision_model
from transformers import PreTrainedModel

from agentrl.chat.chat_format import Vision, read_vision
from agentrl.data.forest import TokenForest, forest_from_data
from agentrl.data.planner import build_micro_batches, packing_problem
from agentrl.distributed.parallel_model import ParallelModel
from agentrl.documents.images import Image, ImageSpan
from agentrl.documents.model_call import pack_floats, pack_ids
from agentrl.documents.training import DBRecordData, Node, TrainableSpan
from agentrl.errors import ForestError, ModelError
from agentrl.model.check_model import check_model
from agentrl.model.logprobs import ForwardOptions
from agentrl.model.vision import PixelReader

PAD, START, END = (IDS[f"<|{name}|>"] for name in ("image_pad", "vision_start", "vision_end"))
KINDS = ("qwen2_5_vl", "qwen3_vl")
IMAGES = {
    "red": drawn_image("red", (24, 16)), "blue": drawn_image("blue", (24, 16)),
    "wide": drawn_image("green", (40, 8)),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def reader(folder: Path) -> PixelReader:
    return PixelReader(folder)


@pytest.fixture(scope="module")
def vision(folder: Path) -> Vision:
    import json

    found = read_vision(folder, json.loads((folder / "config.json").read_text()))
    assert found is not None
    return found


def trajectory(vision: Vision, name: str, *pieces: str | int, task: str = "q") -> DBRecordData:
    """Pieces are names of images, and numbers: that many text tokens, negative ones are trained."""
    ids: list[int] = []
    images: list[ImageSpan] = []
    spans: list[TrainableSpan] = []
    for place, piece in enumerate(pieces):
        if isinstance(piece, str):
            ref = IMAGES[piece].ref
            ids.append(START)
            place_of = {"start": len(ids), "tokens": vision.tokens(ref), "grid": vision.grid(ref)}
            span = ImageSpan(sha256=ref.sha256, **place_of)
            images.append(span)
            ids += [PAD] * span.tokens + [END]
            continue
        seed = [place, abs(piece)] if piece > 0 else [*name.encode(), place]
        start = len(ids)
        ids += np.random.default_rng(seed).integers(0, 200, abs(piece)).tolist()
        if piece < 0:
            spans.append(
                TrainableSpan(start=start, end=len(ids), call=place, version=0, advantage=1.0 + place,
                              temperature=0.9)
            )  # fmt: skip
    trained = sum(span.end - span.start for span in spans)
    return DBRecordData(
        id=name, record=name, task=task, split="train", score=1.0, advantage=1.0, min_version=0,
        max_version=0, tokens=len(ids), trainable_tokens=trained, turns=len(spans),
        nodes=(Node(start=0, end=len(ids)),), spans=tuple(spans), images=tuple(images),
        input_ids=pack_ids(ids), behavior_logprobs=pack_floats([-1.0] * trained),
    )  # fmt: skip


def group(vision: Vision) -> list[DBRecordData]:
    """Shared image and question; then a second image of the same size that differs, none, or a wide one."""
    return [
        trajectory(vision, "a", 3, "red", 5, -4, "blue", 2, -3),
        trajectory(vision, "b", 3, "red", 5, -2, "red", 2, -3),
        trajectory(vision, "c", 3, "red", 5, -6),
        trajectory(vision, "d", 3, "blue", 5, -4, "wide", 4, -2),
    ]


def with_pixels(forest: TokenForest, reader: PixelReader) -> TokenForest:
    pixels = {image.id: reader.read(image)[0] for image in IMAGES.values()}
    return forest if forest.images is None else replace(forest, images=forest.images.with_pixels(pixels))


def plain(model: PreTrainedModel, forest: TokenForest, reader: PixelReader) -> torch.Tensor:
    """float32[T]: each path alone through the whole model, which finds images and positions by itself."""
    by_hash: dict[str, Image] = {image.id: image for image in IMAGES.values()}

    def shown(path: list[int]) -> dict[str, torch.Tensor]:
        if forest.images is None:
            return {}
        starts = [t for t in path if forest.images.image[t] >= 0 and forest.images.offset[t] == 0]
        read = [reader.read(by_hash[forest.images.images[forest.images.image[t]].sha256]) for t in starts]
        return {
            "pixel_values": torch.from_numpy(np.concatenate([pixels for pixels, _ in read])),
            "image_grid_thw": torch.tensor([grid for _, grid in read]),
            "mm_token_type_ids": torch.from_numpy(forest.input_ids[path] == PAD)[None].int(),
        } if read else {}  # fmt: skip

    return plain_logprobs(model, forest, shown)


def gradients(model: PreTrainedModel, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("executor", ["sdpa", "varlen"])
def test_merged_images_equal_each_trajectory_alone(
    kind: str, executor: str, vision: Vision, reader: PixelReader
) -> None:
    """Loss and gradients at 1e-5, those of the vision tower too; the merged batch computes fewer tokens."""
    model = vision_model(kind)
    data = group(vision)
    (merged,) = build_micro_batches(data, 4096, vocab_size=VOCABULARY)
    merged = with_pixels(merged, reader)
    apart = forest_from_data(data, vocab_size=VOCABULARY)
    assert merged.tokens < apart.tokens
    assert len(merged.images.images) == 3

    logprobs, _ = ParallelModel(model, executor=executor)(merged, ForwardOptions())
    merged_loss = (torch.from_numpy(merged.advantage) * logprobs).sum()
    ours = gradients(model, merged_loss)
    model.set_attn_implementation("sdpa")
    alone_loss = (torch.from_numpy(apart.advantage) * plain(model, apart, reader)).sum()
    theirs = gradients(model, alone_loss)
    assert merged_loss.item() == pytest.approx(alone_loss.item(), rel=1e-5)
    assert ours.keys() == theirs.keys()
    assert any("visual.blocks" in name and grad.abs().max() > 1e-3 for name, grad in ours.items())
    for name, grad in ours.items():
        largest = max(1.0, float(theirs[name].abs().max()))
        assert float((grad - theirs[name]).abs().max()) <= 1e-5 * largest, name


def test_images_of_one_size_are_not_merged(vision: Vision) -> None:
    """Two different images have the same ids; their branches part at the first image token."""
    data = [trajectory(vision, "a", 3, "red", 5, -4), trajectory(vision, "b", 3, "blue", 5, -4)]
    (merged,) = build_micro_batches(data, 4096, vocab_size=VOCABULARY)
    alike = [data[0], trajectory(vision, "b", 3, "red", 5, -4)]
    (same,) = build_micro_batches(alike, 4096, vocab_size=VOCABULARY)
    assert merged.tokens == same.tokens + vision.tokens(IMAGES["red"].ref) + 1 + 5


def test_a_cut_tree_keeps_whole_images(vision: Vision, reader: PixelReader) -> None:
    data = group(vision)
    model = vision_model()
    parts = [with_pixels(part, reader) for part in build_micro_batches(data, 40, vocab_size=VOCABULARY)]
    assert len(parts) > 1
    trained = [part for part in parts if part.trainable_tokens]
    total = sum(ParallelModel(model)(part, ForwardOptions())[0].sum().item() for part in trained)
    (merged,) = build_micro_batches(data, 4096, vocab_size=VOCABULARY)
    whole = ParallelModel(model)(with_pixels(merged, reader), ForwardOptions())[0].sum().item()
    assert total == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_vision_model_passes_the_checks_of_training(kind: str) -> None:
    check_model(vision_model(kind))


def test_refusals(vision: Vision, reader: PixelReader) -> None:
    data = [trajectory(vision, "a", 3, "red", 5, -4)]
    forest = forest_from_data(data)
    with pytest.raises(ForestError, match="images without pixels"):
        ParallelModel(vision_model())(forest, ForwardOptions())
    forest = with_pixels(forest, reader)
    for name in ("flex", "per_sequence", "per_sequence_padded"):
        with pytest.raises(ModelError, match=f"{name}.*images"):
            ParallelModel(vision_model(), executor=name)(forest, ForwardOptions())
    with pytest.raises(ModelError, match="reads text only"):
        ParallelModel(tiny_model("qwen3"))(forest, ForwardOptions())
    for change, says in (
        ({"tokens": 5}, "image of 5 tokens has the grid"),
        ({"start": data[0].tokens - 2}, "outside"),
        ({"start": data[0].tokens - 6}, "trainable"),
    ):
        wrong = replace(data[0], images=(replace(data[0].images[0], **change),))
        assert says in packing_problem(wrong, vocab_size=VOCABULARY, max_tokens=4096)


@pytest.mark.parametrize("size", [(24, 16), (40, 8), (7, 5), (200, 90), (1, 1), (64, 512)])
def test_grids_are_those_of_the_image_processor(
    size: tuple[int, int], vision: Vision, reader: PixelReader
) -> None:
    image = drawn_image(size=size)
    pixels, grid = reader.read(image)
    assert vision.grid(image.ref) == grid
    assert vision.tokens(image.ref) * 4 == len(pixels)
