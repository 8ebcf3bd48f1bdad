"""The plan of faults depends on the seed, contains every kind, and stays within its limits."""

from __future__ import annotations

import pytest

from chaos.plan import DATABASE, TRAINER, Fault, FaultKind, Members, make_plan

MEMBERS = Members.of(samplers=4, engines=2, openers=2)


def plan(seed: int = 0, *, seconds: float = 600, replica_set: bool = False) -> list[Fault]:
    return make_plan(
        seed=seed, seconds=seconds, gap=6, lease_seconds=12, members=MEMBERS, replica_set=replica_set
    )


def test_the_seed_determines_the_plan() -> None:
    assert plan(7) == plan(7)
    assert plan(7) != plan(8)


@pytest.mark.parametrize("seed", range(5))
def test_every_kind_comes_before_any_comes_again(seed: int) -> None:
    opening = plan(seed)[:15]
    assert {fault.kind for fault in opening} == set(FaultKind)
    killed = {fault.target.partition("-")[0] for fault in opening if fault.kind is FaultKind.KILL}
    assert killed == {"sampler", "engine", "opener", TRAINER, DATABASE}


def test_faults_come_in_order_within_the_time_and_about_every_gap() -> None:
    times = [fault.at for fault in plan(seconds=6000)]
    assert times == sorted(times)
    assert 0 < times[0] < times[-1] < 6000
    assert len(times) == pytest.approx(1000, rel=0.1)


def test_freezes_last_longer_than_leases_and_timeouts() -> None:
    frozen = [fault for fault in plan() if fault.kind in (FaultKind.FREEZE, FaultKind.SUPERSEDE)]
    kinds = {fault.target.partition("-")[0] for fault in frozen}
    assert kinds == {"sampler", "opener", TRAINER, DATABASE}
    assert all(fault.seconds > (10 if fault.target == DATABASE else 12) for fault in frozen)


def test_the_trainer_is_frozen_only_to_be_replaced() -> None:
    replaced = [fault for fault in plan() if fault.target == TRAINER and fault.kind is FaultKind.FREEZE]
    assert replaced == []


def test_only_delays_have_a_latency() -> None:
    assert all((fault.latency > 0) == (fault.kind is FaultKind.DELAY) for fault in plan())


def test_a_replica_set_loses_its_primary_often_and_has_no_proxies() -> None:
    faults = plan(replica_set=True)
    primary = [fault for fault in faults if fault.target == DATABASE]
    assert len(primary) > len(faults) / 3
    assert not {FaultKind.CUT, FaultKind.STALL, FaultKind.DELAY} & {fault.kind for fault in faults}
