"""Images from a task to a training step: the local engine's logprobs are those of the trainer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rollout_fakes import MemoryImages, OneEngine, make_rollout
from served_engine import Served, serve_locally
from tiny_vision import IDS, VOCABULARY, drawn, drawn_image, save_vision_model
from training_data import training_configs

from agentrl.calls.turns import Turn
from agentrl.chat.open_format import open_chat_format
from agentrl.config.schema import AgentConfig, GroupConfig, ModelConfig, OptimConfig, TrainConfig
from agentrl.data.finalize_group import to_training_data
from agentrl.documents.images import Image, image_of_bytes, image_refs
from agentrl.documents.model_call import DispatchedSamplingTask, unpack_floats, unpack_ids
from agentrl.documents.record import Record
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.task import Claim, Task
from agentrl.documents.training import DBRecordData
from agentrl.errors import ImageError
from agentrl.inference.client import EngineClient
from agentrl.inference.engine import EngineRefusedError
from agentrl.model.logprobs import ForwardOptions
from agentrl.train.build import build_trainer

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("starts_warm")]

PAD = IDS["<|image_pad|>"]


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = save_vision_model(tmp_path_factory.mktemp("vision"), request.param)
    with serve_locally(folder, max_total_tokens=4096) as engine:
        yield engine


async def trajectory(
    served: Served, number: int, first: Image, second: Image
) -> tuple[DBRecordData, list[DispatchedSamplingTask]]:
    """Two turns of a real rollout: the task shows ``first``, the next message ``second``."""
    store = MemoryImages()
    await store.put(first, second)
    calls: list[DispatchedSamplingTask] = []

    async def write(call: Turn) -> None:
        calls.append(call.document())

    task = Task(
        id="train/0/t", task_id="t", split="train", epoch=0, order=0, query="See <image> and say a colour.",
        images=(first.ref,), system_prompt="Look.",
    )  # fmt: skip
    chat_format = open_chat_format(served.folder, ModelConfig())
    async with EngineClient(served.url, 30.0) as client:
        rollout = make_rollout(
            Claim(task=task, traj_id=number, attempt=1, owner="o"), AgentConfig(), chat_format=chat_format,
            engine=OneEngine(client, 2048), write=write, images=store,  # type: ignore[arg-type]
            params=SamplingParams(max_new_tokens=8, temperature=0.9), seed=number,
        )  # fmt: skip
        await rollout.generate()
        shown = [{"type": "text", "text": "And "}, second.ref.part(), {"type": "text", "text": "?"}]
        rollout.append_messages([{"role": "user", "content": shown}])
        await rollout.generate()
        await rollout.finish()
    record = Record(
        id=f"train/0/t/{number}/1", task=task.id, traj_id=number, attempt=1, split="train", epoch=0,
        query=task.query, score=float(number), turns=2,
    )  # fmt: skip
    data = to_training_data(task, record, calls, 1.0 if number else -1.0, GroupConfig())
    assert data is not None
    return data, calls


async def test_images_train_two_steps_as_they_were_sampled(served: Served, tmp_path: Path) -> None:
    """Two trajectories of a group share the task's image; their logprobs match before the first step."""
    red, blue, wide = drawn_image("red"), drawn_image("blue"), drawn_image("green", (40, 8))
    (a, calls), (b, _) = await trajectory(served, 0, red, blue), await trajectory(served, 1, red, wide)
    assert [len(call.images) for call in calls] == [1, 1]
    assert calls[1].parent == calls[0].id
    for call in calls:
        for image in call.images:
            ids = unpack_ids(call.context_ids)[image.start : image.start + image.tokens]
            assert set(ids.tolist()) == {PAD}
    assert [image.sha256 for image in a.images] == [red.id, blue.id]
    assert [ref.sha256 for ref in image_refs(calls[0].messages)] == [red.id]

    model = ModelConfig(model_name_or_path=str(served.folder), dtype="float32")
    trainer = build_trainer(
        training_configs(model, OptimConfig(learning_rate=1e-3),
               TrainConfig(max_tokens=4096)
    ),
        weights=None, total_steps=2,
    )  # fmt: skip
    images = {image.id: image for image in (red, blue, wide)}
    (forest,) = trainer.pack([a, b], images=images)
    assert forest.tokens < a.tokens + b.tokens
    logprobs = trainer.model(forest, ForwardOptions())[0].detach().numpy()
    np.testing.assert_allclose(
        np.sort(logprobs),
        np.sort(np.concatenate([unpack_floats(item.behavior_logprobs) for item in (a, b)])),
        atol=2e-4,
    )
    before = {name: p.detach().clone() for name, p in trainer.policy.model.named_parameters()}
    losses = [trainer.train([a, b], images=images) for _ in range(2)]
    assert all(result.is_finite for result in losses)
    moved = {name for name, p in trainer.policy.model.named_parameters() if not p.equal(before[name])}
    assert any("visual" in name for name in moved)
    assert any("language_model" in name for name in moved)


async def test_another_image_is_another_prompt(served: Served) -> None:
    """The engine's cache does not take one image for another of the same size."""
    red, blue = drawn_image("red"), drawn_image("blue")
    chat_format = open_chat_format(served.folder, ModelConfig())
    greedy = SamplingParams(max_new_tokens=4, temperature=0.0)
    answers = []
    async with EngineClient(served.url, 30.0) as client:
        for image in (red, blue, red):
            content = [image.ref.part(), {"type": "text", "text": "Which colour is it? Say it in one word."}]
            ids = chat_format.render([{"role": "user", "content": content}], None)
            answers.append(await client.generate(ids, greedy, f"r{len(answers)}", images=[image]))
        assert answers[0].logprobs[0] != answers[1].logprobs[0]
        assert answers[0].logprobs == pytest.approx(answers[2].logprobs, abs=1e-5)
        assert answers[2].cached_tokens > 20
        with pytest.raises(EngineRefusedError, match="image tokens"):
            await client.generate(ids, greedy, "wrong", images=[red, blue])


def test_a_model_of_text_refuses_images(tmp_path: Path) -> None:
    folder = save_vision_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "qwen3"}))
    chat_format = open_chat_format(folder, ModelConfig())
    image = image_of_bytes(drawn())
    with pytest.raises(ImageError, match="reads text only"):
        chat_format.render([{"role": "user", "content": [image.ref.part()]}], None)
    assert VOCABULARY > PAD
    assert replace(image).ref == image.ref
