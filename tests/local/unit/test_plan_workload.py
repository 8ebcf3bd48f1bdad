from __future__ import annotations

from functools import partial

import pytest
from parsed_flags import parsed

from agentrl.config.training import PlanConfig
from agentrl.errors import ConfigError
from agentrl.local.plan.search import build_workload, list_layouts, name_of, parse_gpus

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
