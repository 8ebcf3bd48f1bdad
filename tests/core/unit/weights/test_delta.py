"""Deltas: bit-identical for any dtype, shape and chain; damaged files never write outside. And distances."""

from __future__ import annotations

import hashlib
import random
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from agentrl.errors import ModelError, PublishError
from agentrl.weights import delta, local_copy
from agentrl.weights.delta import encode, layer_differences
from agentrl.weights.folder import TensorChecksum, checksums, weights_digest
from agentrl.weights.local_copy import apply

_DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool)


@st.composite
def chains(draw: st.DrawFn) -> list[dict[str, Tensor]]:
    """Return successive weights of one model: any share of the elements changes from one to the next."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    kinds = draw(st.lists(st.sampled_from(_DTYPES), min_size=1, max_size=4))
    shapes = [draw(st.lists(st.integers(0, 12), max_size=3)) for _ in kinds]
    versions: list[dict[str, Tensor]] = []
    for _ in range(draw(st.integers(2, 5))):
        share = draw(st.sampled_from((0.0, 0.02, 0.4, 1.0)))
        weights = {}
        for number, (dtype, shape) in enumerate(zip(kinds, shapes, strict=True)):
            name = f"layers.{number}"
            size = torch.empty(shape, dtype=dtype).nbytes
            data = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), generator=generator)
            fresh = data.to(torch.uint8).view(dtype).reshape(shape)  # NaN, −0.0 and infinities too
            kept = torch.rand(shape, generator=generator) >= share
            weights[name] = torch.where(kept, versions[-1][name], fresh) if versions else fresh
        versions.append(weights)
    return versions


def _write(folder: Path, weights: dict[str, Tensor]) -> None:
    names = sorted(weights)
    save_file({name: weights[name] for name in names[::2]}, folder / "model-1.safetensors")
    save_file({name: weights[name] for name in names[1::2]}, folder / "model-2.safetensors")


def _bits(folder: Path) -> dict[str, TensorChecksum]:
    found = load_file(folder / "model-1.safetensors") | load_file(folder / "model-2.safetensors")
    return {name: TensorChecksum.of(tensor) for name, tensor in found.items()}


@given(chains(), st.sampled_from((3, 7, 1 << 20)), st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_a_chain_of_deltas_gives_the_bits_of_the_last_version(
    versions: list[dict[str, Tensor]], chunk: int, first: int
) -> None:
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "CHUNK", chunk)
        patch.setattr(local_copy, "CHUNK", chunk)
        folder = Path(name)
        _write(folder, versions[0])
        files = []
        for number, (before, after) in enumerate(pairwise(versions)):
            written = encode(before, after, folder / f"{number}.delta")
            files.append(folder / f"{number}.delta")
            assert written.file == next(file for file in checksums(folder) if file.name == written.file.name)
            assert written.tensors == {name: TensorChecksum.of(tensor) for name, tensor in after.items()}
        middle = min(first, len(files))  # a part of the chain was applied before a kill
        if middle:
            apply(files[:middle], folder, {k: TensorChecksum.of(v) for k, v in versions[middle].items()})
        apply(files, folder, written.tensors)
        assert _bits(folder) == written.tensors
        assert weights_digest(_bits(folder)) == weights_digest(written.tensors)


def test_unchanged_tensors_are_absent_and_few_changes_take_few_bytes(tmp_path: Path) -> None:
    before = {"a": torch.randn(500_000).bfloat16(), "b": torch.ones(500_000)}
    after = {"a": before["a"].clone(), "b": before["b"].clone()}
    after["a"][torch.randperm(500_000)[:6500]] += 0.25
    written = encode(before, after, tmp_path / "x.delta", threads=2)
    assert (written.changed, written.elements) == (pytest.approx(6500, abs=200), 1_000_000)
    assert written.file.bytes < 0.02 * before["a"].nbytes


@pytest.mark.parametrize("change", [lambda t: t.float(), lambda t: t.reshape(2, -1), lambda t: t[:-1]])
def test_other_dtypes_and_shapes_are_refused(change: object, tmp_path: Path) -> None:
    before = torch.zeros(8, dtype=torch.bfloat16)
    with pytest.raises(PublishError, match="no delta between them"):
        encode({"a": before}, {"a": change(before)}, tmp_path / "x.delta")  # type: ignore[operator]
    with pytest.raises(PublishError, match="tensor b is not in both"):
        encode({"a": before}, {"a": before, "b": before}, tmp_path / "y.delta")


def test_a_damaged_file_is_refused_and_writes_nothing_outside(tmp_path: Path) -> None:
    before = {"a": torch.zeros(400, dtype=torch.int16), "b": torch.zeros(400, dtype=torch.int16)}
    after = {"a": before["a"].clone(), "b": before["b"]}
    after["a"][::7] = 9
    good = encode(before, after, tmp_path / "good.delta")
    content = (tmp_path / "good.delta").read_bytes()
    damaged = tmp_path / "damaged.delta"
    chance = random.Random(0)
    for _ in range(300):
        broken = bytearray(content)
        for _ in range(chance.randint(1, 3)):
            broken[chance.randrange(len(broken))] = chance.randrange(256)
        damaged.write_bytes(broken[: chance.choice((len(broken), chance.randrange(len(broken))))])
        _write(tmp_path, before)
        header = (tmp_path / "model-1.safetensors").read_bytes()[:8]
        try:
            apply([damaged], tmp_path, good.tensors)
        except PublishError:
            assert (tmp_path / "model-1.safetensors").read_bytes()[:8] == header
        else:
            assert _bits(tmp_path) == good.tensors
        assert not load_file(tmp_path / "model-2.safetensors")["b"].any()


_ONE = "[0, 1, 1, 16, [1, 1, 1]]"


@pytest.mark.attack
@pytest.mark.parametrize(
    "chunks",
    [
        *(f"[{_ONE.replace('16, [1', f'16, [{size}')}]" for size in (2**70, 2**62, -5, 1.5, "null", '"1"')),
        *(f"[{_ONE.replace('16', str(offset))}]" for offset in (2**70, 2**62, -16, "1e400", "NaN", "true")),
        *(f"[{_ONE.replace('[0', f'[{number}')}]" for number in (2**70, -1, "1e400", "NaN", "[]", "{}")),
        *(f"[{_ONE.replace('0, 1', f'0, {changed}')}]" for changed in (0, 2**70, -1, 401)),
        "[]", "5", "{}", "null", "[5]", '{"abcde": 1}', "[[]]", "[" * 100_000, "[" * 100_000 + "]" * 100_000,
        f"[1{'0' * 5000}]",
    ],
)  # fmt: skip
def test_an_index_that_somebody_wrote_is_refused_as_damaged(chunks: str, tmp_path: Path) -> None:
    before = {"a": torch.zeros(400, dtype=torch.int16)}
    index = f'{{"a": {{"dtype": "I16", "shape": [400], "chunks": {chunks}}}}}'
    packed = zstandard.compress(index.encode())
    file = tmp_path / "x.delta"
    file.write_bytes(delta.MAGIC + bytes(64) + packed + delta.LENGTH.pack(len(packed)))
    _write(tmp_path, before)
    with pytest.raises(PublishError, match="is damaged or does not fit"):
        apply([file], tmp_path, {})
    with file.open("rb") as stream, pytest.raises(PublishError, match="is damaged or does not fit"):
        delta.DeltaFile(stream, file).changes("a", delta.StoredShape("I16", (400,), delta.WORDS[2]))
    assert not load_file(tmp_path / "model-1.safetensors")["a"].any()


def test_a_delta_of_another_model_is_refused(tmp_path: Path) -> None:
    before, after = {"c": torch.zeros(4)}, {"c": torch.ones(4)}
    written = encode(before, after, tmp_path / "x.delta")
    _write(tmp_path, {"a": torch.zeros(4)})
    with pytest.raises(PublishError, match="has no tensor c, which"):
        apply([tmp_path / "x.delta"], tmp_path, written.tensors)
    _write(tmp_path, {"c": torch.full((4,), 2.0)})
    after_half = {"c": torch.tensor([0.0, 0.0, 0.0, 1.0])}
    half = encode(before, after_half, tmp_path / "y.delta")
    with pytest.raises(PublishError, match=r"tensor c in .* differs from what was published"):
        apply([tmp_path / "y.delta"], tmp_path, half.tensors)


def test_a_version_of_an_older_trainer_is_verified_by_its_sha256(tmp_path: Path) -> None:
    before, after = {"a": torch.zeros(8)}, {"a": torch.ones(8)}
    encode(before, after, tmp_path / "x.delta")
    _write(tmp_path, before)
    digest = hashlib.sha256(after["a"].numpy().tobytes()).hexdigest()
    assert apply([tmp_path / "x.delta"], tmp_path, {"a": TensorChecksum("F32", (8,), digest)}) == ["a"]
    with pytest.raises(PublishError, match="differs from what was published"):
        apply([tmp_path / "x.delta"], tmp_path, {"a": TensorChecksum("F32", (8,), digest[::-1])})


def write_one(folder: Path, **tensors: torch.Tensor) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_norms_are_those_of_each_layer(tmp_path: Path) -> None:
    ones = torch.ones(2, 2)
    names = ("embed.weight", "model.layers.0.a", "model.layers.0.b", "model.layers.10.a")
    first = write_one(tmp_path / "a", **{name: ones.clone() for name in names})
    second = write_one(tmp_path / "b", **{name: ones + index for index, name in enumerate(names)})
    found = layer_differences(first, second)
    assert [(item.layer, item.norm) for item in found] == [
        ("embed.weight", 2.0), ("layer 0", pytest.approx(8**0.5)), ("layer 10", 2.0),
    ]  # fmt: skip
    assert [item.difference for item in found] == [0.0, pytest.approx((4 + 16) ** 0.5), 6.0]
    assert found[2].relative == 3.0


def test_other_tensors_are_refused(tmp_path: Path) -> None:
    first = write_one(tmp_path / "a", x=torch.ones(2))
    with pytest.raises(ModelError, match="hold other tensors, x among them"):
        layer_differences(first, write_one(tmp_path / "b", y=torch.ones(2)))
    with pytest.raises(ModelError, match=r"x has the shape \[2\]"):
        layer_differences(first, write_one(tmp_path / "c", x=torch.ones(3)))
    (tmp_path / "d").mkdir()
    with pytest.raises(ModelError, match="holds no weights"):
        layer_differences(first, tmp_path / "d")
