"""Adapters of the local engine: several in one batch, each with its own logprobs and its own prefixes."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from local_engine import cpu_model, request_of, work_off
from tiny_policy import write_tiny_policy
from written_adapter import write_served

from agentrl.config.schema import AdapterConfig, ModelConfig
from agentrl.errors import ModelError
from agentrl.local.engine.linears import LoadedAdapter
from agentrl.local.engine.scheduler import GenerationRequest, Scheduler
from agentrl.model.load import Policy, load_policy
from agentrl.weights.folder import complete_folder
from agentrl.weights.snapshot import write_alone

PROMPT = [n * 7919 % 200 for n in range(40)]


@dataclass
class Trained:
    """A policy of the trainer with its adapter, and the folder that engines load."""

    policy: Policy
    folder: Path

    def logprobs(self, made: GenerationRequest) -> torch.Tensor:
        return logprobs(self.policy.model, made)


def logprobs(model: torch.nn.Module, made: GenerationRequest) -> torch.Tensor:
    """float32[generated tokens] by transformers' own forward."""
    with torch.no_grad():
        logits = model(torch.from_numpy(made.tokens.astype(np.int64))[None]).logits[0].float()
    wanted = torch.tensor(made.output_ids)[:, None]
    return logits.log_softmax(-1)[made.prompt_tokens - 1 : -1].gather(-1, wanted)[:, 0]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_policy(tmp_path_factory.mktemp("base") / "tiny", hidden_size=64)


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    """Two adapters of other ranks and layers; half of the layers of the first are as they began."""
    made = {}
    for seed, (name, flags) in enumerate(
        {"one@3": {"lora_rank": 4}, "two@9": {"lora_rank": 6, "lora_target_modules": "q_proj,v_proj"}}.items()
    ):
        policy = load_policy(ModelConfig(model_name_or_path=str(base)), adapter=AdapterConfig(**flags))  # type: ignore[arg-type]
        assert policy.adapter is not None
        torch.manual_seed(seed)
        for parameter_name, value in policy.adapter.named_parameters():
            if ".lora_B." in parameter_name and (name != "one@3" or ".layers.1." in parameter_name):
                value.data.normal_(std=0.3)
        folder = tmp_path_factory.mktemp("adapter")
        write_served(policy.adapter, folder)
        made[name] = Trained(policy, folder)
    return made


class Engine:
    """A scheduler over the real model."""

    def __init__(self, base: Path, **limits: int) -> None:
        self.model = cpu_model(base, torch.float32)
        cache = self.model.new_cache(4096)
        self.scheduler = Scheduler(self.model, cache, version="0", max_running=16, chunk_tokens=64, **limits)
        self.ended: list[GenerationRequest] = []

    def load(self, name: str, trained: Trained) -> None:
        self.scheduler.load_adapter(self.model.read_adapter(name, str(trained.folder)))

    def submit(self, seed: int, adapter: LoadedAdapter | None) -> GenerationRequest:
        request = request_of(PROMPT, 12, self.ended.append, seed, adapter=adapter)
        self.scheduler.submit(request)
        return request


@pytest.fixture
def engine(base: Path, trained: dict[str, Trained]) -> Engine:
    engine = Engine(base, max_adapters=2)
    for name, each in trained.items():
        engine.load(name, each)
    return engine


def test_layers_that_add_nothing_are_not_computed(engine: Engine) -> None:
    held = {name: {int(layer.split(".")[2]) for layer in each.layers}
            for name, each in engine.scheduler.adapters.items()}  # fmt: skip
    assert held["one@3"] == {1}
    assert held["two@9"] >= {0, 1}


@pytest.mark.exactness
def test_rows_of_several_adapters_and_of_none_have_the_trainers_logprobs(
    engine: Engine, trained: dict[str, Trained], base: Path, tmp_path: Path
) -> None:
    names = ["one@3", None, "two@9", "one@3", "two@9", None]
    made = [engine.submit(n, engine.scheduler.adapters.get(name or "")) for n, name in enumerate(names)]
    work_off(engine.scheduler)
    plain = load_policy(ModelConfig(model_name_or_path=str(base))).model
    for request, name in zip(made, names, strict=True):
        wanted = logprobs(plain, request) if name is None else trained[name].logprobs(request)
        torch.testing.assert_close(torch.tensor(request.logprobs), wanted, atol=1e-5, rtol=0)
        if name is not None:
            assert (wanted - logprobs(plain, request)).abs().max() > 0.05
    # The first request of each adapter computes the prompt; the second one reuses it, and no other does.
    assert [request.cached_tokens for request in made] == [0] * 3 + [len(PROMPT) - 1] * 3
    write_alone(trained["one@3"].policy.published, tmp_path)
    complete_folder(base, tmp_path)
    merged = load_policy(ModelConfig(model_name_or_path=str(base)), tmp_path).model
    torch.testing.assert_close(torch.tensor(made[0].logprobs), logprobs(merged, made[0]), atol=1e-4, rtol=0)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:Found missing adapter keys")
def test_frozen_layers_are_not_published_and_peft_reads_the_files(
    trained: dict[str, Trained], base: Path
) -> None:
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    one = trained["one@3"]
    names = load_file(one.folder / "adapter_model.safetensors")
    assert len(names) == 14
    assert all(name.startswith("base_model.model.model.layers.1.") for name in names)
    again = load_policy(ModelConfig(model_name_or_path=str(base)), one.folder, AdapterConfig(lora_rank=4))
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(one.folder))
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, one.policy.model(ids).logits, atol=1e-4, rtol=0)
        torch.testing.assert_close(again.model(ids).logits, one.policy.model(ids).logits, atol=1e-4, rtol=0)


def test_an_unloaded_adapter_serves_its_requests_to_their_end(
    engine: Engine, trained: dict[str, Trained]
) -> None:
    scheduler = engine.scheduler
    request = engine.submit(1, scheduler.adapters["one@3"])
    for _ in range(4):
        scheduler.step()
    scheduler.unload_adapter("one@3")
    engine.load("one@3", trained["two@9"])
    scheduler.replace_model(engine.model, "0")  # also after an update of the base
    work_off(engine.scheduler)
    expected = trained["one@3"].logprobs(request)
    torch.testing.assert_close(torch.tensor(request.logprobs), expected, atol=1e-5, rtol=0)
    assert sum(slot.computed for slot in scheduler.cache._slots) == 0
    again = engine.submit(2, scheduler.adapters["one@3"])
    work_off(engine.scheduler)
    assert again.cached_tokens == 0


def test_adapters_are_bounded_and_checked(
    engine: Engine, trained: dict[str, Trained], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=r"2 adapters are loaded, which is the limit: one@3, two@9"):
        engine.load("three@1", trained["one@3"])
    with pytest.raises(ModelError, match="already loaded"):
        engine.load("one@3", trained["one@3"])
    with pytest.raises(ModelError, match="there is no adapter four@1"):
        engine.scheduler.unload_adapter("four@1")
    with pytest.raises(ModelError, match="holds no adapter"):
        engine.model.read_adapter("bad", str(tmp_path))
    for file in trained["one@3"].folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "adapter_model.safetensors").write_bytes(b"junk")
    with pytest.raises(ModelError, match="holds no adapter"):
        engine.model.read_adapter("bad", str(tmp_path))
    shutil.copy(trained["one@3"].folder / "adapter_model.safetensors", tmp_path)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**settings, "use_dora": True}))
    with pytest.raises(ModelError, match="use_dora"):
        engine.model.read_adapter("bad", str(tmp_path))
    other = cpu_model(write_tiny_policy(tmp_path / "wide", hidden_size=96), torch.float32)
    with pytest.raises(ModelError, match="does not fit the model"):
        other.read_adapter("bad", str(trained["one@3"].folder))
