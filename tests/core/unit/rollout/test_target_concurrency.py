"""``--target_concurrency auto`` on a simulated engine: near the best number, alone and with others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulated_engine import Engine, Load, run

from agentrl.documents.run import EngineFigures, InferenceService
from agentrl.documents.status import ServiceStatus
from agentrl.rollout.target_concurrency import EngineLimit, TargetConcurrency

MOST = 10**6
BEST = (88, 96)
"""About the best fixed numbers for the load of these tests, by ``scripts/bench/target_concurrency.py``."""


def found(start: int = 16) -> TargetConcurrency:
    return TargetConcurrency(start, MOST)


def test_it_reaches_the_tokens_of_the_best_fixed_number() -> None:
    best = max(run(Engine(), Load(seed=1), [number], 6000, after=1800) for number in BEST)
    assert run(Engine(), Load(seed=1), [found()], 6000, after=1800) >= 0.97 * best


def test_samplers_of_one_engine_do_not_fight() -> None:
    samplers = [found(8), found(16), found(32)]
    totals: list[int] = []

    def look(now: float) -> None:
        if now >= 1800:
            totals.append(sum(sampler.number for sampler in samplers))

    best = run(Engine(), Load(seed=1), [BEST[0]], 6000, after=1800)
    assert run(Engine(), Load(seed=1), samplers, 6000, after=1800, event=look) >= 0.9 * best
    assert 50 < min(totals) <= max(totals) < 150


def test_it_follows_the_load() -> None:
    """Long contexts leave room for few."""
    engine, load, target = Engine(), Load(seed=2), found()
    seen: dict[float, int] = {}

    def change(now: float) -> None:
        if now == 5400:
            load.prompt, load.result = 6000, 1500
        seen[now] = target.number

    run(engine, load, [target], 12600, event=change)
    assert seen[12600] < 0.6 * seen[5400]


def test_updates_of_the_weights_are_left_out() -> None:
    engine = Engine()

    def update(now: float) -> int:
        if now % 60 == 0:
            engine.drop_cache()
        return int(now // 60)

    target = found()
    rate = run(engine, Load(seed=0), [target], 7200, after=3600, event=update)
    assert 50 < target.number < 130
    assert rate > 700


def engine_at(url: str, **fields: object) -> InferenceService:
    values = {"status": ServiceStatus.READY, "policy_version": 0, **fields}
    return InferenceService(id=url, url=url, engine="vllm", model="m", host="h", pid=1, **values)  # type: ignore[arg-type]


def figures(at: float, **fields: float) -> EngineFigures:
    values = {
        "running": 16, "waiting": 0, "kv_usage": 0.2, "capacity": 100_000, "generated": int(100 * at),
        "computed": int(100 * at), "preempted": 0, **fields,
    }  # fmt: skip
    return EngineFigures(at=at, **values)  # type: ignore[arg-type]


def beats(
    target: TargetConcurrency, *engines: InferenceService, ended: int = 0, running: int | None = None
) -> list[str]:
    numbers = target.limits or {engine.url: target.number // len(engines) for engine in engines}
    return target.observe(
        engines, held=dict(numbers), tokens={}, ended=ended,
        running=sum(numbers.values()) if running is None else running, share=1.0, samplers=1,
    )  # fmt: skip


def test_an_engine_without_metrics_keeps_its_part_and_is_named_once() -> None:
    target = TargetConcurrency(16, MOST)
    silent = engine_at("http://silent")
    assert beats(target, silent, engine_at("http://a", figures=figures(0))) == ["http://silent"]
    for second in range(2, 400, 2):
        assert beats(target, silent, engine_at("http://a", figures=figures(second)), ended=2) == []
    assert target.limits["http://silent"] == 8
    assert target.limits["http://a"] > 8
    assert target.number == sum(target.limits.values())


def test_each_engine_has_a_number_of_its_own_and_a_new_one_gets_its_part() -> None:
    target = TargetConcurrency(16, MOST)
    for second in range(0, 200, 2):
        full = figures(second, kv_usage=0.99, waiting=4)
        beats(
            target,
            engine_at("http://a", figures=figures(second)),
            engine_at("http://b", figures=full),
            ended=2,
        )
    assert target.limits["http://a"] > 8 > target.limits["http://b"] >= 1
    assert "http://b" not in target.why or "KV cache" in target.why
    third = [engine_at(f"http://{name}", figures=figures(200)) for name in "abc"]
    before = target.number
    beats(target, *third)
    assert target.limits["http://c"] == round(before / 3)
    beats(target, third[0])
    assert set(target.limits) == {"http://a"}


def test_fewer_trajectories_than_it_may_run_say_nothing() -> None:
    target = TargetConcurrency(16, MOST)
    for second in range(0, 600, 2):
        beats(target, engine_at("http://a", figures=figures(second)), ended=2, running=9)
    assert target.number == 16


@pytest.mark.parametrize(
    "pressed",
    [{"kv_usage": 0.98}, {"waiting": 8}, {"preempted": 5}],
    ids=["kv cache", "queue", "preemptions"],
)
def test_pressure_cuts_and_never_below_one(pressed: dict[str, float]) -> None:
    limit = EngineLimit(16)
    for second in range(0, 4000, 2):
        now = figures(second, **pressed)
        if "preempted" in pressed:
            now = replace(now, preempted=second)
        limit.observe(
            now, era=0, works=True, is_full=True, held=limit.number, turned=0.1, step=1.0, context=0.0
        )
    assert 1 <= limit.number < 8


def test_most_is_the_ceiling() -> None:
    target = TargetConcurrency(16, 20)
    for second in range(0, 600, 2):
        beats(target, engine_at("http://a", figures=figures(second, generated=second * second)), ended=4)
    assert target.number == 20
