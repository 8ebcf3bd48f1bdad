from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
import torch

from agentrl.config.load import parse
from agentrl.config.schema import ModelConfig, TrainConfig
from agentrl.model import flops
from agentrl.model.flops import NARROWEST, Precision, ProductSpeed, choose_precision, measure_products

CPU = torch.device("cpu")
WIDTH = 576


def choose(monkeypatch: pytest.MonkeyPatch, factor: float, *, width: int = WIDTH, **flags: str) -> Precision:
    """Choose on a CPU that multiplies bfloat16 ``factor`` times as fast as float32."""
    monkeypatch.setattr(
        flops, "measure_products", lambda device, width: ProductSpeed(64, width, 1e9, factor * 1e9)
    )
    model = ModelConfig(dtype=flags.pop("dtype", "auto"))  # type: ignore[arg-type]
    return choose_precision(model, TrainConfig(**flags), CPU, width)  # type: ignore[arg-type]


def test_a_cpu_multiplies_in_the_type_that_it_multiplies_faster(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    fast = choose(monkeypatch, 2.5)
    assert fast == Precision(torch.float32, torch.bfloat16)
    assert choose(monkeypatch, 0.02, autocast_bf16=fast.autocast_bf16) == fast, "as it is stored with the run"
    assert "runs at 2.5 GFLOP/s in bfloat16 and 1.0 in float32, 2.5 times as fast" in caplog.text
    slow = choose(monkeypatch, 0.02)
    assert slow == Precision()
    assert "products in float32" in caplog.text
    assert choose(monkeypatch, 2.5, autocast_bf16=slow.autocast_bf16) == slow


def test_a_gain_that_casting_would_cost_is_not_worthwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(monkeypatch, 1.1) == Precision()
    assert choose(monkeypatch, 2.5, width=NARROWEST - 1) == Precision()


def test_flags_win_and_a_slower_choice_warns_with_the_factor(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose(monkeypatch, 2.5, autocast_bf16="false") == Precision()
    assert not caplog.records
    assert choose(monkeypatch, 0.02, autocast_bf16="true").products == torch.bfloat16
    assert "slower here" in caplog.text
    assert "0.02 times as fast" in caplog.text


def test_bfloat16_weights_need_no_policy_and_warn_where_they_are_slower(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = choose(monkeypatch, 2.5, dtype="bfloat16")
    assert found == Precision(torch.bfloat16, torch.bfloat16)
    assert found.policy is None
    assert not caplog.records
    assert choose(monkeypatch, 0.02, dtype="bfloat16") == found
    assert "--dtype bfloat16 makes training slower here" in caplog.text
    assert "0.02 times as fast" in caplog.text
    assert Precision().policy is None


def test_mixed_precision_adds_gradients_up_in_float32() -> None:
    policy = Precision(products=torch.bfloat16).policy
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)


def test_a_gpu_is_asked_and_measured_only_for_the_factor(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(flops, "measure_products", lambda device, width: ProductSpeed(64, width, 8, 2))
    for is_supported in (True, False):
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda found=is_supported, *, including_emulation: found
        )
        found = choose_precision(ModelConfig(), TrainConfig(), torch.device("cuda", 0), 64)
        assert (found.products == torch.bfloat16) is is_supported
    choose_precision(ModelConfig(), TrainConfig(autocast_bf16="true"), torch.device("cuda", 0), 64)
    assert "Some GPU only emulates bfloat16" in caplog.text
    assert "0.25 times as fast" in caplog.text


def test_both_types_are_measured_once() -> None:
    speed = measure_products(CPU, 64)
    assert speed.float32 > 0
    assert speed.bfloat16 > 0
    assert measure_products(CPU, 64) is speed


@pytest.mark.parametrize("first", [0.06, 0.9])
def test_the_first_product_which_loads_the_library_does_not_count(
    monkeypatch: pytest.MonkeyPatch, first: float
) -> None:
    """In a fresh installation it took 62 ms of float32, and made bfloat16 look ten times as fast."""
    now = [0.0]

    def linear(inputs: torch.Tensor, weight: torch.Tensor) -> None:
        now[0] += first if now[0] == 0 else 0.006 if inputs.dtype == torch.bfloat16 else 0.001

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    assert measure_products.__wrapped__(CPU, 576).factor == pytest.approx(1 / 6, rel=0.01)


@pytest.mark.parametrize(
    ("words", "yaml", "expected"),
    [
        ([], "", "auto"),
        (["--autocast_bf16"], "", "true"),
        (["--autocast_bf16", "True"], "", "true"),
        (["--autocast_bf16", "auto"], "autocast_bf16: true", "auto"),
        (["--no_autocast_bf16"], "autocast_bf16: true", "false"),
        ([], "autocast_bf16: false", "false"),
        ([], "autocast_bf16: auto", "auto"),
    ],
)
def test_the_switch_reads_flags_and_yaml(words: list[str], yaml: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "run.yml").write_text(yaml)
    argv = [*words, "--config", str(tmp_path / "run.yml")]
    found = parse(argv, command="agentrl train", description="", shown=())
    assert found[TrainConfig].autocast_bf16 == expected
