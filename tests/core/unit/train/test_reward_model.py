"""``agentrl sft --objective reward``: pairs, loss, and a folder whose reward in transformers is ours."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from tiny_policy import TEMPLATE, tiny_format, write_tiny_policy
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from agentrl.cli.services import sft as main
from agentrl.errors import AgentRLError, ConfigError, ModelError, TaskFileError
from agentrl.scoring.reward_model import REWARDS, RewardScale, render_trajectory
from agentrl.train.reward_model import PairGroup, RewardLoss, pairs_of, read_pairs, trajectory_data

ENDS_IN_PADDING = TEMPLATE.replace("<|im_end|>{{ '\\n' }}", "<|pad|>")


def conversation(number: int, said: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": str(number)}, {"role": "assistant", "content": said}]


def write_preferences(file: Path, count: int = 40) -> None:
    """Questions after a number, of which the polite answer is preferred."""
    sides = {"chosen": "sure, gladly", "rejected": "no"}
    lines = [{side: conversation(number, said) for side, said in sides.items()} for number in range(count)]
    file.write_text("\n".join(map(json.dumps, lines)))


def flags_in(folder: Path, **policy: str) -> list[str]:
    write_tiny_policy(folder / "base", **policy)
    write_preferences(folder / "pairs.jsonl")
    return [
        "--objective", "reward", "--model_name_or_path", "base", "--train_file", "pairs.jsonl",
        "--batch_size", "8", "--learning_rate", "1e-2", "--log_steps", "1", "--output_dir", "out",
    ]  # fmt: skip


def losses(log: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss (\S+)", log)]


@pytest.mark.parametrize("template", [TEMPLATE, ENDS_IN_PADDING])
def test_transformers_gives_the_rewards_that_were_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], template: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*flags_in(tmp_path, template=template), "--max_steps", "6"]) == 0
    log = capfd.readouterr().err
    assert losses(log)[-1] < losses(log)[0] / 2
    assert "groups without two scores" in log
    heldout = re.search(r"held out: accuracy (\S+), margin (\S+) on", log)
    assert heldout is not None
    assert float(heldout[1]) == 1.0
    model = AutoModelForSequenceClassification.from_pretrained("out").requires_grad_(requires_grad=False)
    assert type(model).__name__ == "Qwen3ForSequenceClassification"
    assert model.config.num_labels == 1
    tokenizer = AutoTokenizer.from_pretrained("out")
    assert tokenizer.pad_token_id == model.config.pad_token_id
    groups = read_pairs(tmp_path / "pairs.jsonl", tiny_format(template))
    ids = [
        render_trajectory(tiny_format(template), conversation(n, s))
        for n in (7, 12)
        for s in ("sure, gladly", "no")
    ]
    alone = [float(model(input_ids=torch.tensor([each])).logits[0, 0]) for each in ids]
    padded = tokenizer.pad({"input_ids": ids}, return_tensors="pt")
    assert model(**padded).logits[:, 0].tolist() == pytest.approx(alone, abs=1e-4)
    assert alone[0] > alone[1]
    assert alone[2] > alone[3]
    scale = RewardScale.read(tmp_path / "out")
    assert scale is not None
    held = [item for group in groups if group.is_held_out(0.1) for item in group.items]
    found = [
        float(model(input_ids=torch.tensor([list(memoryview(item.input_ids).cast("i"))])).logits[0, 0])
        for item in held
    ]
    assert scale.mean == pytest.approx(sum(found) / len(found), abs=1e-4)
    assert scale.measured["held out"]["pairs"] == len(held) // 2


def test_micro_batches_and_merging_change_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = [*flags_in(tmp_path), "--max_steps", "2", "--center_rewards_coefficient", "0.01"]
    found = []
    for more in ((), ("--max_tokens", "70", "--prefix_merging", "off")):
        assert main([*flags, *more]) == 0
        found.append(losses(capfd.readouterr().err))
    assert found[0] == pytest.approx(found[1], abs=2e-4)


def test_a_reward_model_is_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = flags_in(tmp_path)
    assert main([*flags, "--max_steps", "4"]) == 0
    last = losses(capfd.readouterr().err)[-1]
    more = ["--model_name_or_path", "out", "--output_dir", "more", "--learning_rate", "1e-9"]
    assert main([*flags, *more, "--max_steps", "1"]) == 0
    assert losses(capfd.readouterr().err)[0] < max(2 * last, 0.1)


def test_the_loss_is_that_of_all_pairs_of_each_group() -> None:
    scores = {"a": (1.0, 0.0, 0.0), "b": (0.5, 0.5), "c": (2.0, 1.0, 0.0)}
    data = [
        trajectory_data(f"{group}{place}", [1, 2], group, score)
        for group, values in scores.items()
        for place, score in enumerate(values)
    ]
    rewards = torch.tensor([0.3, -0.2, 0.5, 9.0, -9.0, 1.0, 1.5, -0.5], requires_grad=True)

    def term(high: int, low: int) -> torch.Tensor:
        wanted = 0.1 * (data[high].score - data[low].score)
        one = -logsigmoid(rewards[high] - rewards[low] - wanted)
        return one + 0.01 * (rewards[high] + rewards[low]) ** 2

    expected = (term(0, 1) + term(0, 2)) / 2 / 2 + (term(5, 6) + term(5, 7) + term(6, 7)) / 3 / 2
    expected.backward()
    slopes, metrics = RewardLoss(margin=0.1, center=0.01)(rewards, data)
    assert metrics["loss"] == pytest.approx(float(expected.detach()), abs=1e-6)
    assert rewards.grad is not None
    assert torch.allclose(slopes, rewards.grad, atol=1e-6)
    assert metrics["pairs"] == 5
    assert metrics["accuracy"] == pytest.approx(1 / 4 + 2 / 3 / 2)
    assert len(pairs_of(data[3:5])[0]) == 0


def test_ties_are_no_pairs_and_a_question_is_held_out_as_a_whole() -> None:
    group = PairGroup(
        tuple(trajectory_data(str(i), [1, 2], "g", s) for i, s in enumerate((0, 1, 1, 0))), "why?"
    )
    assert group.pairs == 4
    assert not group.is_held_out(0.0)
    many = [PairGroup((), f"question {number}") for number in range(1000)]
    held = [each.is_held_out(0.1) for each in many]
    assert 60 < sum(held) < 140
    assert held == [each.is_held_out(0.1) for each in many]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("[]", "it is no object"),
        ("{", "Expecting property name"),
        ('{"chosen": "a"}', "rejected is no text"),
        ('{"prompt": "q", "chosen": "a", "rejected": []}', "rejected is no text"),
        ('{"chosen": "a", "rejected": "b"}', "begin with different messages"),
        ('{"prompt": "q", "chosen": "a", "rejected": "b", "margin": 0}', "margin is 0"),
        ('{"prompt": "q", "chosen": "a", "rejected": "a"}', "holds no pair"),
        ("", "holds no pair"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(line)
    with pytest.raises(TaskFileError, match=says):
        read_pairs(file, tiny_format())


def test_texts_are_one_message_each(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"prompt": "q", "chosen": "a", "rejected": "b", "margin": 3}')
    (group,) = read_pairs(file, tiny_format())
    assert [item.score for item in group.items] == [3.0, 0.0]
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert list(memoryview(group.items[0].input_ids).cast("i")) == render_trajectory(tiny_format(), messages)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--lora_rank", "4"], "--lora_rank 4 with --objective reward"),
        (["--tp_size", "2"], "--tp_size 2 with --objective reward"),
        (["--sft_min_score", "0.5", "--sft_from_records", "r"], "which compares all scores"),
        (["--objective", "sft", "--reward_margin", "1"], "it is a reward model's"),
        (["--reward_heldout", "0.999999999"], "all are held out"),
        (["--output_dir", "base"], "would overwrite the model"),
    ],
)
def test_wrong_flags_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=says):
        main([*flags_in(tmp_path), *more])


def test_a_classifier_and_a_trajectory_beyond_the_context_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags, config = flags_in(tmp_path), tmp_path / "base" / "config.json"
    content = json.loads(config.read_text())
    config.write_text(json.dumps({**content, "max_position_embeddings": 16}))
    with pytest.raises(ConfigError, match="longer than the context of the model, 16 tokens"):
        main(flags)
    labels = {"id2label": {"0": "a", "1": "b"}, "architectures": ["Qwen3ForSequenceClassification"]}
    config.write_text(json.dumps({**content, **labels}))
    with pytest.raises(ModelError, match="a classifier of 2 labels"):
        main(flags)


@pytest.mark.parametrize("content", ["{}", '{"mean": 0, "scale": 0}', '{"mean": NaN, "scale": 1}', "["])
def test_a_wrong_scale_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / REWARDS).write_text(content)
    with pytest.raises(AgentRLError, match=REWARDS):
        RewardScale.read(tmp_path)


def test_rewards_are_normalized() -> None:
    scale = RewardScale(mean=1.0, scale=2.0)
    assert scale.normalize(5.0, "none") == 5.0
    assert scale.normalize(5.0, "affine") == 2.0
    assert scale.normalize(1.0, "sigmoid") == 0.5
    assert scale.normalize(-1e6, "sigmoid") == 0.0
