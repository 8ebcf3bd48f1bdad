"""``agentrl plan``: layouts, reasons, commands, estimates; ``test_planned_memory.py`` has its memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from parsed_flags import parsed
from transformers import (
    Gemma2Config,
    PretrainedConfig,
    Qwen2VLConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    StableLmConfig,
)

from agentrl.config.training import PlanConfig
from agentrl.distributed.mesh import Layout
from agentrl.errors import AgentRLError, ConfigError
from agentrl.local import local_cli
from agentrl.local.placement import parse_gpus
from agentrl.local.plan.memory import ModelNumbers, PlannedModel, measure_step, open_model
from agentrl.local.plan.search import (
    Candidate,
    PlannedServices,
    Search,
    StepTime,
    Workload,
    build_workload,
    estimate_step,
    list_layouts,
    name_of,
    size_services,
)

Plan = Callable[[Path, str], tuple[int, Any]]
SIZES = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Qwen3Config(**SIZES).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Plan:
    """The exit code and the JSON of a plan for the model of a folder, with more flags."""

    def run(folder: Path, words: str) -> tuple[int, Any]:
        code = local_cli.plan(["--model", str(folder), "--context", "1024", "--json", *words.split()])
        return code, json.loads(capsys.readouterr().out)

    return run


def test_layouts_that_fit_come_with_memory_flags_and_services(folder: Path, plan: Plan) -> None:
    words = "--learning_rate 1e-5 --dtype float32 --colocate true --inf_mem_ratio 0.5"
    code, found = plan(folder, f"--gpus 4xH100 {words}")
    assert code == 0
    turns = found["turns"]
    assert turns["in_turns"] == max(turns["engine"], turns["step"]) == 39.5
    assert turns["at_once"] == turns["engine"] + turns["step"] > 39.5
    fits = [item for item in found["layouts"] if item["state"] == "fits"]
    assert len(fits) == 3
    assert [item["seconds"] for item in fits] == sorted(item["seconds"] for item in fits)
    assert all(item["peak_bytes"] <= found["gpus"]["planned_bytes"] for item in fits)
    first = fits[0]
    assert "accelerate launch" in first["command"]
    assert "--dtype float32" in first["command"]
    assert "--max_prompt_tokens 768 --max_new_tokens 256" in first["command"]
    named = {name: size for name, size in first["layout"].items() if size > 1 and name != "dp_shard"}
    assert all(f"--{name}_size {size}" in first["command"] for name, size in named.items())
    assert found["services"]["samplers"] >= 1


def test_the_command_lets_trajectories_grow_to_the_context(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 131072}
    (folder / "config.json").write_text(json.dumps(config))
    words = ["--model", str(folder), "--gpus", "1xH200", "--context", "131072"]
    for given, limits in (
        ([], "--max_prompt_tokens 122876 --max_new_tokens 8196"),
        (["--max_prompt_tokens", "65536"], "--max_prompt_tokens 65536 --max_new_tokens 8196"),
    ):
        assert local_cli.plan([*words, *given, "--json"]) == 0
        assert limits in json.loads(capsys.readouterr().out)["layouts"][0]["command"]


def test_what_is_too_large_says_what_would_help(folder: Path, plan: Plan) -> None:
    code, found = plan(folder, "--gpus 4xH100 --gpu_memory_gib 0.001")
    assert code == local_cli.NOTHING_FITS
    assert {item["state"] for item in found["layouts"]} == {"too large"}
    reasons = {item["activation_checkpointing"]: item["reason"] for item in found["layouts"]}
    assert "--activation_checkpointing full or" in reasons["none"]
    assert "--activation_checkpointing" not in reasons["full"]
    assert found["services"] is None


def test_the_text_says_what_is_estimated(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", str(folder), "--context", "1024", "--gpus", "8xH200", "--colocate", "true"]
    assert local_cli.plan(words) == 0
    told = capsys.readouterr().out
    assert "the engine's 111.2 GiB and the step's" in told
    for part in ("Layouts that fit", "which --tp_size 8 does not divide", "roofline", "accelerate launch"):
        assert part in told


EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    ("config", "flags", "reason"),
    [
        (Qwen3Config(**SIZES), "--tp_size 8", "4 attention heads, which --tp_size 8 does not divide"),
        (Qwen3Config(**SIZES), "--pp_size 8", "the model has 4 layers"),
        (Qwen3Config(**SIZES), "--ep_size 2", "no experts"),
        (Qwen3Config(**SIZES), "--tp_size 2 --lora_rank 8", "it works with layers that FSDP2 shards"),
        (StableLmConfig(**SIZES), "--tp_size 2", "no tensor-parallel plan"),
        (Qwen3MoeConfig(**SIZES, **EXPERTS), "--ep_size 4", "6 experts"),
    ],
    ids=["heads", "layers", "no experts", "adapter", "no plan", "experts"],
)
def test_says_why_a_layout_is_refused(
    tmp_path: Path, plan: Plan, config: PretrainedConfig, flags: str, reason: str
) -> None:
    config.save_pretrained(tmp_path)
    code, found = plan(tmp_path, flags)
    assert code == local_cli.NOTHING_FITS
    assert any(reason in item["reason"] for item in found["refused"]), found["refused"]


def test_the_reference_model_is_counted(folder: Path, plan: Plan) -> None:
    _, plain = plan(folder, "--gpus 8xH200")
    _, found = plan(folder, "--gpus 8xH200 --kl_coef 0.01")
    before, after = (item["layouts"][0] for item in (plain, found))
    shard = 2 * plain["model"]["parameters"] // 8
    assert after["bytes_by_part"]["reference model"] == pytest.approx(shard, abs=8)
    assert after["peak_bytes"] == pytest.approx(before["peak_bytes"] + shard, abs=8)
    with pytest.raises(AgentRLError, match="--reference_model missing is not a folder"):
        local_cli.plan(
            ["--model", str(folder), "--context", "64", "--kl_coef", "1", "--reference_model", "missing"]
        )


def test_a_critics_own_model_is_counted_as_a_second_policy(folder: Path, plan: Plan) -> None:
    plain, head, model = (
        plan(folder, f"--gpus 8xH200 {flags}")[1]["layouts"][0]["bytes_by_part"]
        for flags in ("", "--recipe ppo --critic head", "--recipe ppo")
    )
    for part in ("parameters", "gradients", "optimizer states"):
        assert (head[part], model[part]) == (plain[part], 2 * plain[part])


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ("--gpus 8xP100", "--gpus: 'P100' is unknown"),
        ("--context 5000", "longer than the model's context of 4096"),
        ("--context 512 --max_tokens 256", "longer than a micro-batch"),
        ("--model missing", "--model missing is not a folder"),
        ("--model .", "has no config.json"),
    ],
)
def test_bad_input(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, error: str
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(AgentRLError, match=error) as raised:
        local_cli.plan(["--model", str(folder), *flags.split()])
    assert raised.value.exit_code == 2
    assert raised.value.hint


@pytest.mark.parametrize(
    ("config", "error"),
    [
        (Gemma2Config(**SIZES), "Gemma2ForCausalLM does not support"),
        (Qwen2VLConfig(), "vision-language model"),
    ],
)
def test_models_that_the_trainer_cannot_serve(tmp_path: Path, config: Any, error: str) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(AgentRLError, match=error):
        local_cli.plan(["--model", str(tmp_path), "--context", "1024"])


def test_a_broken_configuration_and_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(AgentRLError, match="cannot be read"):
        local_cli.plan(["--model", str(tmp_path)])
    with pytest.raises(AgentRLError, match="no model is given"):
        local_cli.plan([])


configs = partial(parsed, command="agentrl plan", extra=[PlanConfig])


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [("8xH100", "H100", 8), ("H200", "H200", 1), ("2 x rtx4090", "4090", 2), ("4×A100-80GB", "A100", 4)],
)
def test_reads_a_number_and_a_kind_of_gpu(text: str, name: str, count: int) -> None:
    cluster = parse_gpus(text)
    assert (cluster.gpu.name, cluster.count) == (name, count)


@pytest.mark.parametrize("text", ["8xP100", "0xH100", "-1xH100", "", "eight"])
def test_refuses_an_unknown_gpu(text: str) -> None:
    with pytest.raises(ConfigError, match="--gpus"):
        parse_gpus(text)


def test_the_memory_of_a_kind_can_be_replaced() -> None:
    assert parse_gpus("1xA100", memory_gib=39.5).gpu.memory_gib == 39.5


def test_machines_are_joined_by_the_network() -> None:
    cluster = parse_gpus("16xH100", network_gbps=400)
    assert (cluster.link_gb_s(8), cluster.link_gb_s(16)) == (450, 50)


def test_layouts_use_all_gpus_and_keep_the_sizes_that_are_given() -> None:
    layouts = list(list_layouts(parse_gpus("8xH100"), configs()))
    assert {layout.world for layout in layouts} == {8}
    assert len(layouts) == len(set(layouts)) == 35  # 8 = 2·2·2 over fsdp, tp, cp, pp, ep
    kept = list(list_layouts(parse_gpus("8xH100"), configs("--tp_size", "2", "--pp_size", "1")))
    assert {(layout.tp, layout.pp) for layout in kept} == {(2, 1)}


def test_layouts_have_readable_names() -> None:
    (layout,) = list_layouts(parse_gpus("1xH100"), configs())
    assert name_of(layout) == "one GPU"
    flags = configs("--tp_size", "2", "--cp_size", "1", "--pp_size", "1", "--ep_size", "1")
    (layout,) = list_layouts(parse_gpus("8xH100"), flags)
    assert name_of(layout) == "fsdp4 × tp2"


@pytest.mark.parametrize(
    ("merging", "tokens"), [("off", 32 * 5500), ("trajectory", 32 * 1000), ("group", 4 * (400 + 8 * 600))]
)
def test_merged_prefixes_are_computed_once(merging: str, tokens: int) -> None:
    flags = configs("--context", "1000", "--prompt_tokens", "400", "--prefix_merging", merging)
    assert build_workload(flags).computed_tokens == tokens


def test_each_rank_runs_a_trajectory_at_least() -> None:
    work = build_workload(configs("--context", "1000", "--groups_per_step", "1", "--num_generations", "4"))
    assert work.max_tokens == 1000
    assert [work.micro_batches(ranks) for ranks in (1, 2, 4, 8)] == [4, 2, 1, 1]
    assert work.rank_tokens(8) == 1000


@pytest.mark.parametrize(
    "flags",
    [
        ("--context", "1000", "--max_tokens", "500"),
        ("--context", "1000", "--trajectory_tokens", "2000"),
        ("--context", "1000", "--prompt_tokens", "1001"),
    ],
)
def test_refuses_lengths_that_do_not_fit_into_one_another(flags: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="--context 1000"):
        build_workload(configs(*flags))


WORK = Workload(
    groups=4, group_size=8, trajectory_tokens=4000, turns=10, trained_share=0.5,
    computed_tokens=128_000, max_tokens=4000, passes=1,
)  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> PlannedModel:
    """A model of 0.2 billion parameters."""
    Qwen3Config(
        vocab_size=32_000, hidden_size=1024, intermediate_size=3072, num_hidden_layers=12,
        num_attention_heads=16, num_key_value_heads=8, head_dim=64, max_position_embeddings=8192,
    ).save_pretrained(tmp_path)  # fmt: skip
    return open_model(tmp_path, 4000)


def seconds(
    model: PlannedModel, layout: Layout, checkpointing: str = "none", *, always: bool = False
) -> StepTime:
    """The estimate for ``layout`` on H100s."""
    return estimate_step(
        model, WORK, layout, parse_gpus(f"{layout.world}xH100"), checkpointing=checkpointing,
        reduces_always=always, element_bytes=2, trained=1.0, mfu=0.4,
    )  # fmt: skip


def test_ranks_share_the_computation(model: PlannedModel) -> None:
    alone = seconds(model, Layout())
    assert alone.gather == alone.exchange == alone.bubble == 0
    for layout in (Layout(dp_shard=4), Layout(tp=4), Layout(cp=4), Layout(pp=4)):
        assert seconds(model, layout).compute == pytest.approx(alone.compute / 4, rel=0.01)


def test_each_dimension_costs_what_it_exchanges(model: PlannedModel) -> None:
    assert seconds(model, Layout(dp_shard=4)).gather > 0
    assert seconds(model, Layout(dp_shard=4), always=True).gather > seconds(model, Layout(dp_shard=4)).gather
    assert seconds(model, Layout(tp=4)).exchange > 0
    assert seconds(model, Layout(pp=4)).bubble == pytest.approx(seconds(model, Layout(pp=4)).compute * 3 / 32)
    assert seconds(model, Layout(), "full").compute == pytest.approx(seconds(model, Layout()).compute * 4 / 3)


def test_norms_of_an_amd_gpu_are_not_planned_as_one_kernel(model: PlannedModel) -> None:
    peaks = []
    for kind in ("H200", "MI300X"):
        search = Search(model=model, work=WORK, cluster=parse_gpus(kind), configs=configs())
        candidate = Candidate(
            layout=Layout(), checkpointing="none", reduction="last", time=seconds(model, Layout())
        )
        peaks.append(measure_step(ModelNumbers.of(model.module), search.spec(candidate), Layout()).peak)
    assert peaks[0] < 0.95 * peaks[1]


def services(model: PlannedModel, step: float) -> PlannedServices:
    """The services of a step of ``step`` seconds."""
    gpu = parse_gpus("H100").gpu
    return size_services(model, WORK, step, gpu, request_tokens_per_second=50, tool_seconds=1)


def test_services_follow_the_rate_of_the_trainer(model: PlannedModel) -> None:
    slow, fast = services(model, 32.0), services(model, 3.2)
    assert slow.trajectories_per_second == 1
    assert slow.turns_per_second == 10
    assert slow.generated_per_second == 2000
    assert slow.in_flight == 2000 // 50 + 10
    assert slow.sampler_cores == pytest.approx(10 * 2.7e-3)  # the figure of docs/benchmarks.md
    assert slow.samplers == slow.engines == 1
    assert fast.sampler_cores == pytest.approx(10 * slow.sampler_cores)
    assert fast.stored_gib_per_hour == pytest.approx(10 * slow.stored_gib_per_hour)


def test_an_engine_gets_the_gpus_that_its_weights_need(model: PlannedModel) -> None:
    large = replace(model, parameters=70_000_000_000)
    assert services(large, 32.0).engine_tp > services(model, 32.0).engine_tp == 1
