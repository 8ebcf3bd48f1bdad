"""``agentrl parity``: its prompts and flags, what is compared, and what counts as within."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from agentrl.config.schema import EngineConfig, ModelConfig
from agentrl.documents.sampling import SamplingParams
from agentrl.errors import ConfigError, EngineError
from agentrl.inference.engines import commands
from agentrl.inference.engines.commands import EngineCommand
from agentrl.local import parity
from agentrl.local.parity import (
    BFLOAT16_LIMIT,
    MAX_BATCH,
    MEAN_LIMIT,
    ParityDifference,
    batch_spread,
    encode_prompts,
    render,
    started_engine,
)

SERVES = """
import http.server, sys
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""


def test_the_difference_is_absolute_over_all_tokens() -> None:
    ours = np.array([-1.0, -2.0, -3.0], np.float32)
    theirs = np.array([-1.0, -2.5, -2.0])
    difference = ParityDifference.of("local", "varlen", ours, theirs)
    assert (difference.tokens, difference.mean, difference.max) == (3, 0.5, 1.0)
    assert difference.p99 == pytest.approx(0.99)
    ratios = np.exp(np.array([0.0, 0.5, -1.0]))
    assert difference.kl == pytest.approx(np.mean(ratios - 1 - np.log(ratios)))
    assert not difference.within
    close = ParityDifference.of("local", "varlen", np.array([1e-10]), np.array([0.0]))
    assert close.kl == pytest.approx(5e-21, rel=1e-5, abs=0)


@pytest.mark.parametrize(("mean", "within"), [(MEAN_LIMIT / 2, True), (MEAN_LIMIT, False), (np.nan, False)])
def test_the_mean_decides_and_a_nan_is_above(mean: float, within: bool) -> None:
    difference = ParityDifference.of("e", "x", np.array([mean]), np.array([0.0]))
    assert difference.within is within
    out = io.StringIO()
    Console(file=out, width=120).print(render([difference], "folder"))
    assert ("within" if within else "above") in out.getvalue()


def test_products_in_bfloat16_have_a_wider_limit() -> None:
    ours, theirs = np.array([BFLOAT16_LIMIT / 2]), np.array([0.0])
    assert not ParityDifference.of("e", "x", ours, theirs).within
    assert ParityDifference.of("e", "x", ours, theirs, BFLOAT16_LIMIT).within


def test_a_mixture_has_a_row_without_and_with_replayed_routing() -> None:
    ours, theirs = np.array([0.5]), np.array([0.0])
    rows = [
        ParityDifference.of("e", "varlen", ours, theirs, MEAN_LIMIT, kind) for kind in ("own", "replayed")
    ]
    out = io.StringIO()
    Console(file=out, width=120).print(render(rows, "folder"))
    assert "varlen, own routing" in out.getvalue()
    assert "varlen, replayed routing" in out.getvalue()


class _Engine:
    """Samples 7, 7, 7 …; with ``error`` the logprobs of more than two requests at once differ by it."""

    def __init__(self, error: float, other: int = 7) -> None:
        self.error, self.other = error, other
        self.running = self.largest = 0

    async def generate(self, ids: tuple[int, ...], params: SamplingParams, rid: str) -> Any:
        self.running += 1
        await asyncio.sleep(0)
        is_alone = self.running <= 2
        self.largest = max(self.largest, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        shift = 0.0 if is_alone else self.error
        output = (7, 7 if is_alone else self.other, 7)
        return SimpleNamespace(output_ids=output, logprobs=(-1.0, -1.0 - shift, -2.0 - 8 * shift))


@pytest.mark.parametrize(("error", "other", "spread"), [(0.0, 7, 0.0), (0.25, 7, 2.0), (0.25, 9, 0.25)])
async def test_an_engine_is_compared_with_itself_in_batches_of_other_sizes(
    error: float, other: int, spread: float
) -> None:
    engine: Any = _Engine(error, other)
    assert await batch_spread(engine, [(number,) for number in range(MAX_BATCH)]) == spread
    assert engine.largest == MAX_BATCH
    difference = ParityDifference.of("e", "x", np.zeros(1), np.zeros(1))
    out = io.StringIO()
    Console(file=out, width=120).print(render([dataclasses.replace(difference, batch_max=spread)], "folder"))
    line = "yes" if spread == 0 else f"no, |Δlogprob| up to {spread:.2e}"
    assert f"e, batch-invariant over 1…64: {line}\n" in out.getvalue()


class _Tokenizer:
    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return messages[0]["content"]

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]


class _Policy:
    tokenizer = _Tokenizer()


def test_prompts_are_as_many_as_asked_and_all_different() -> None:
    policy: Any = _Policy()
    prompts = encode_prompts(policy, 20)
    assert len(set(prompts)) == 20
    assert all(prompts)


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--model_name_or_path", "x", "--prompts", "0"],
        ["--model_name_or_path", "x", "--dtype", "int8"],
        ["--model_name_or_path", "x", "--prompt", "3"],
    ],
)
def test_wrong_flags_are_config_errors(argv: list[str]) -> None:
    with pytest.raises(ConfigError):
        parity.main(argv)


async def _start_and_stop(folder: Path) -> None:
    async with started_engine(ModelConfig(model_name_or_path=str(folder)), EngineConfig()):
        pass


@pytest.mark.parametrize(("code", "is_kept"), [("raise SystemExit('no memory')", True), (SERVES, False)])
def test_the_log_of_an_engine_is_kept_if_an_error_names_it(
    code: str, is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def command(folder: str, model: ModelConfig, config: EngineConfig, port: int) -> EngineCommand:
        return EngineCommand([sys.executable, "-c", code, str(port)])

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(commands, "engine_command", command)
    if not is_kept:
        asyncio.run(_start_and_stop(tmp_path))
        assert not list(tmp_path.iterdir())
        return
    with pytest.raises(EngineError, match="no memory") as caught:
        asyncio.run(_start_and_stop(tmp_path))
    (log,) = tmp_path.glob("agentrl-engine-*/engine.log")
    assert caught.value.hint == f"see {log}"
    assert f"the log of the engine is kept: {log}" in capsys.readouterr().err
