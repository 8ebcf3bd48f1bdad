"""Adapters made by peft: each kind is applied as peft applies it or refused by name, wherever one is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_policy import write_tiny_policy
from transformers import AutoModelForCausalLM

from agentrl.config.schema import AdapterConfig, ModelConfig
from agentrl.errors import ConfigError, ModelError
from agentrl.local.engine.model import LocalModel
from agentrl.model.load import load_policy
from agentrl.model.lora import read_layers
from agentrl.model.merge_adapter import merge_adapter

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore::peft.utils.warning.PeftWarning"),
]
CPU = torch.device("cpu")
TARGETS = ["q_proj", "v_proj", "down_proj"]
APPLIED: dict[str, dict[str, Any]] = {
    "plain": {},
    "rsLoRA": {"use_rslora": True},
    "rank pattern": {"rank_pattern": {"v_proj": 2, r"layers\.1\..*down_proj": 7}},
    "alpha pattern": {"alpha_pattern": {"layers.0.self_attn.q_proj": 64, "down_proj": 3}},
    "all of them": {
        "use_rslora": True, "rank_pattern": {"q_proj": 3}, "alpha_pattern": {"^model.*q_proj": 5},
    },
    "one layer": {"layers_to_transform": [1]},
    "regular expression": {"target_modules": r".*self_attn\.(q|o)_proj"},
    "random start": {"init_lora_weights": False},
}  # fmt: skip
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "DoRA": ({"use_dora": True}, "use_dora True"),
    "PiSSA": ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa', which changes the base model"),
    "OLoRA": ({"init_lora_weights": "olora"}, "init_lora_weights 'olora'"),
    "modules_to_save": ({"modules_to_save": ["norm"]}, r"modules_to_save \['norm'\]"),
    "bias": ({"bias": "lora_only"}, "bias 'lora_only'"),
    "bias of B": ({"lora_bias": True}, "lora_bias True"),
    "tokens": ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
    "repeated layers": ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_policy(tmp_path_factory.mktemp("base") / "tiny")


def plain(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


def write(base: Path, folder: Path, **settings: Any) -> Path:
    """Let peft write an adapter whose A and B are random."""
    settings = {"target_modules": TARGETS, **settings}
    model = get_peft_model(plain(base), LoraConfig(r=4, lora_alpha=16, task_type="CAUSAL_LM", **settings))
    torch.manual_seed(1)
    for name, value in model.named_parameters():
        if ".lora_" in name:
            value.data.normal_(std=0.2)
    model.save_pretrained(str(folder))
    return folder


@pytest.mark.exactness
@pytest.mark.parametrize("kind", APPLIED)
def test_an_adapter_is_applied_as_peft_applies_it(kind: str, base: Path, tmp_path: Path) -> None:
    adapter = write(base, tmp_path / "adapter", **APPLIED[kind])
    expected = PeftModel.from_pretrained(plain(base), str(adapter)).merge_and_unload().state_dict()
    merge_adapter(adapter, base, tmp_path / "merged")
    merged = plain(tmp_path / "merged").state_dict()
    assert merged.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(merged[name], value, atol=1e-6, rtol=0, msg=name)
    before = plain(base).state_dict()
    changed = {name for name in expected if not torch.equal(expected[name], before[name])}
    served = LocalModel(str(base), dtype=torch.float32, device=CPU).read_adapter(kind, str(adapter))
    assert changed == {f"{name}.weight" for name in served.layers}
    for name, (a, b, scale) in served.layers.items():
        weight = f"{name}.weight"
        torch.testing.assert_close(scale * (a @ b).t(), expected[weight] - before[weight], atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_applied_is_refused_by_name(kind: str, base: Path, tmp_path: Path) -> None:
    settings, says = REFUSED[kind]
    adapter = write(base, tmp_path / "adapter", **settings)
    with pytest.raises(ModelError, match=says):
        merge_adapter(adapter, base, tmp_path / "merged")
    with pytest.raises(ModelError, match=says):
        LocalModel(str(base), dtype=torch.float32, device=CPU).read_adapter("x", str(adapter))
    flags = AdapterConfig(lora_rank=4, lora_alpha=16, lora_target_modules=",".join(TARGETS))
    with pytest.raises(ModelError, match=says):
        load_policy(ModelConfig(model_name_or_path=str(base)), adapter, flags)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"peft_type": "IA3"}, "describes no LoRA"),
        ({"a_setting_of_next_year": 3}, "a_setting_of_next_year 3"),
        ({"rank_pattern": {"q_proj": 9}}, "q_proj with rank 9"),
    ],
)
def test_settings_that_nobody_knows_are_refused(
    change: dict[str, Any], says: str, base: Path, tmp_path: Path
) -> None:
    adapter = write(base, tmp_path / "adapter")
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**settings, **change}))
    with pytest.raises(ModelError, match=says):
        merge_adapter(adapter, base, tmp_path / "merged")


def test_half_a_pair_and_other_tensors_are_refused(base: Path, tmp_path: Path) -> None:
    adapter = write(base, tmp_path / "adapter")
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    for changed in (
        {name: value for name, value in tensors.items() if name != first},
        {name: value for name, value in tensors.items() if name != first.replace("lora_A", "lora_B")},
        tensors | {"base_model.model.model.norm.weight": torch.ones(32)},
        {name.replace("q_proj", "r_proj"): value for name, value in tensors.items()},
    ):
        save_file(changed, file)
        with pytest.raises(ModelError, match=r"LoRA has pairs|does not fit the model"):
            read_layers(adapter, shapes(base))


def shapes(base: Path) -> dict[str, tuple[int, ...]]:
    weights = plain(base).state_dict().items()
    return {name.removesuffix(".weight"): tuple(value.shape) for name, value in weights}


@pytest.mark.parametrize("kind", ["rsLoRA", "rank pattern", "alpha pattern"])
def test_a_trainer_goes_on_from_no_adapter_with_settings_that_no_flag_has(
    kind: str, base: Path, tmp_path: Path
) -> None:
    adapter = write(base, tmp_path / "adapter", **APPLIED[kind])
    flags = AdapterConfig(lora_rank=4, lora_alpha=16, lora_target_modules=",".join(TARGETS))
    with pytest.raises(ConfigError, match=r"has (use_rslora|rank_pattern|alpha_pattern) "):
        load_policy(ModelConfig(model_name_or_path=str(base)), adapter, flags)
