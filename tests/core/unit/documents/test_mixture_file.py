"""A mixture's file: what it says, the line of what is wrong in it, and whose turn its weights make it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.documents.mixture import MixtureSource, Turns, read_mixture
from agentrl.errors import ConfigError


def mixture(folder: Path, text: str) -> Path:
    path = folder / "mix.yml"
    path.write_text(text)
    return path


def test_what_a_source_leaves_out_has_its_default(tmp_path: Path) -> None:
    text = """
sources:
  easy: {path: easy.jsonl}
  hard:
    path: env:maze?n=5
    weight: 3
    gate: {source: easy, pass_rate: 0.8}
    pools: {solved: {threshold: 1, weight: 0.2}, other: {threshold: 0.9, weight: 1}}
"""
    easy, hard = read_mixture(mixture(tmp_path, text)).stored
    assert (easy.weight, easy.gate, easy.pools, easy.is_open) == (1, None, (), True)
    assert hard.gate is not None
    assert (hard.gate.source, hard.gate.pass_rate, hard.gate.groups, hard.is_open) == ("easy", 0.8, 16, False)
    assert [(pool.name, pool.weight) for pool in hard.pools] == [("other", 1), ("solved", 0.2)]
    assert [hard.pool_of(rate).name for rate in (0.0, 0.9, 0.91, 1.0)] == [*["other"] * 2, *["solved"] * 2]


@pytest.mark.parametrize(
    ("source", "line", "problem"),
    [
        ("a: {path: x, weight: 0}", 2, "weight is 0"),
        ("a: {path: x, weight: .inf}", 2, "weight is inf"),
        ("a: {weight: 1}", 2, "path' is missing"),
        ("a: {path: other.yaml}", 2, "another mixture"),
        ("a/b: {path: x}", 2, "no name of a source"),
        ("1: {path: x}", 2, ""),
        ("a: {path: x}\n  b: {path: x}\n  a: {path: y}", 4, "sources.a is there twice"),
        ("a: {path: x, wieght: 2}", 2, "unknown key 'sources.a.wieght'"),
        ("a: {path: x, gate: {source: aa, pass_rate: 0.5}}", 2, "'aa', which is no source"),
        ("a: {path: x, gate: {source: a, pass_rate: 0.5}}", 2, "waits for itself: a → a"),
        ("a: {path: x}\n  b: {path: x, gate: {source: a, pass_rate: 0}}", 3, "pass_rate is 0"),
        ("a: {path: x}\n  b: {path: x, gate: {source: a, pass_rate: 1.5}}", 3, "at most 1"),
        (
            "c: {path: x, gate: {source: a, pass_rate: 1}}\n  a: {path: x, gate: {source: b, pass_rate: 1}}"
            "\n  b: {path: x, gate: {source: a, pass_rate: 1}}", 3, "waits for itself: a → b → a",
        ),
        ("a: {path: x, pools: {p: {threshold: 1, weight: 0}}}", 2, "nothing would be sampled twice"),
        (
            "a: {path: x, pools: {p: {threshold: 1, weight: 1}, q: {threshold: 1, weight: 0}}}", 2,
            "a threshold twice",
        ),
        ("a: {path: x, pools: {p: {threshold: 1, weight: 2}}}", 2, "weight is 2; it must be at most 1"),
    ],
)  # fmt: skip
def test_an_error_names_the_line(tmp_path: Path, source: str, line: int, problem: str) -> None:
    path = mixture(tmp_path, f"sources:\n  {source}\n")
    with pytest.raises(ConfigError) as error:
        read_mixture(path)
    assert f"{path}:{line}: " in error.value.message
    assert problem in error.value.message


@pytest.mark.parametrize("text", ["", "sources: {}", "sources: [a]", "- a", "sources: {a: {path: x}"])
def test_a_file_that_is_no_mixture_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        read_mixture(mixture(tmp_path, text))


weights = st.lists(st.floats(0.01, 100), min_size=1, max_size=6)


@given(weights, st.integers(1, 200))
def test_no_source_is_a_group_ahead_of_its_weight(given_weights: list[float], groups: int) -> None:
    names = [f"s{n}" for n in range(len(given_weights))]
    shares = dict(zip(names, given_weights, strict=True))
    sources = [MixtureSource(name=name, weight=weight) for name, weight in shares.items()]
    turns, begun = Turns.of(sources), Counter[str]()
    for _ in range(groups):
        name = turns.next(names)
        turns.begin(name, names)
        begun[name] += 1
    total = sum(given_weights)
    for name in names:
        assert begun[name] - groups * shares[name] / total < 1
        assert turns.credits[name] == pytest.approx(groups * shares[name] / total - begun[name], abs=1e-6)


def test_weights_of_three_to_one_alternate_evenly_and_equal_ones_in_the_order_of_the_file() -> None:
    def first(count: int, **weights: float) -> str:
        turns = Turns.of([MixtureSource(name=name, weight=weight) for name, weight in weights.items()])
        names = []
        for _ in range(count):
            names.append(turns.next([*weights]))
            turns.begin(names[-1], [*weights])
        return "".join(names)

    assert first(8, a=3, b=1) == "aabaaaba"
    assert first(6, a=0.1, b=0.1, c=0.1) == "abcabc"


def test_a_source_that_was_left_out_does_not_catch_up() -> None:
    turns = Turns.of([MixtureSource(name=name, weight=1) for name in "ab"])
    for _ in range(100):
        turns.begin(turns.next(["a"]), ["a"])
    names = []
    for _ in range(6):
        names.append(turns.next(["a", "b"]))
        turns.begin(names[-1], ["a", "b"])
    assert names == ["a", "b"] * 3
