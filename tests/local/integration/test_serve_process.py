"""``agentrl serve`` as a process: it registers, follows published weights, refuses broken ones, stops."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from engine_policy import assert_logprobs
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from agentrl.config.schema import RunConfig
from agentrl.documents.model_call import VersionSpan
from agentrl.documents.run import InferenceService, PolicyVersion
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.status import ServiceStatus
from agentrl.inference.client import EngineClient
from agentrl.inference.session import EngineRouter
from agentrl.store.client import Store, open_store
from agentrl.weights.delta import encode
from agentrl.weights.folder import TensorChecksum, weights_digest, write_manifest
from agentrl.weights.live import LiveHolder
from agentrl.weights.publish import publish_live
from agentrl.weights.snapshot import WHOLE

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240), pytest.mark.usefixtures("starts_warm")]


def save_model(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


Start = Callable[[], "subprocess.Popen[bytes]"]


@pytest.fixture
def start(store: Store, mongo_uri: str, tmp_path: Path) -> Iterator[Start]:
    """Starts the command, which serves a tiny model as version 0."""
    argv = [
        *(sys.executable, "-m", "agentrl", "serve", "--engine", "local", "--run_name", store.run_name),
        *("--db_connection_string", mongo_uri, "--model_name_or_path", str(save_model(tmp_path / "base", 1))),
        *("--log_dir", str(tmp_path / "logs"), "--heartbeat_seconds", "0.2", "--max_total_tokens", "8192"),
        *("--weights_dir", str(tmp_path / "copies")),
    ]
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        with (tmp_path / f"serve-{len(started)}.out").open("wb") as output:
            started.append(
                subprocess.Popen(
                    argv, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
                )
            )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait(10)


async def engine_when(
    store: Store, process: subprocess.Popen[bytes], condition: Callable[[InferenceService], bool]
) -> InferenceService:
    """The run's engine as soon as ``condition`` holds for it."""
    deadline = asyncio.get_running_loop().time() + 120
    while True:
        for service in await store.services.live(60.0):
            if condition(service):
                return service
        assert process.poll() is None, "agentrl serve has ended"
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.05)


async def publish(store: Store, folder: Path, version: int) -> PolicyVersion:
    tensors = {name: TensorChecksum.of(value) for name, value in load_file(folder / WHOLE).items()}
    files = write_manifest(folder, version=version, tensors=tensors)
    document = PolicyVersion(
        id=version, step=version, location=str(folder), files=files, train_step=None,
        digest=weights_digest(tensors),
    )  # fmt: skip
    await store.policy_versions.publish(document)
    return document


async def publish_delta(store: Store, base: PolicyVersion, folder: Path, version: int, seed: int) -> None:
    """Publish the random weights of ``seed`` as a delta."""
    after = load_file(save_model(folder / "whole", seed) / WHOLE)
    (folder / "delta").mkdir()
    written = encode(load_file(Path(base.location) / WHOLE), after, folder / "delta" / "rank-0.delta")
    files = write_manifest(folder / "delta", version=version, tensors=written.tensors)
    document = PolicyVersion(
        id=version, step=version, location=str(folder / "delta"), files=files, train_step=None,
        encoding="delta", base=base.id, digest=weights_digest(written.tensors),
    )  # fmt: skip
    await store.policy_versions.publish(document)


async def test_it_follows_good_weights_refuses_broken_ones_and_stops(
    store: Store, start: Start, tmp_path: Path
) -> None:
    serve = start()
    service = await engine_when(store, serve, lambda s: s.status is ServiceStatus.READY)
    assert (service.policy_version, service.engine) == (0, "local")
    params = SamplingParams(max_new_tokens=1200, extra={"ignore_eos": True})
    router = EngineRouter(lambda: store.services.live(60.0))
    async with router.session("trajectory") as session:
        flying = asyncio.create_task(session.generate([5, 6, 7], params))
        await engine_when(store, serve, lambda s: s.running_requests == 1)
        first = await publish(store, save_model(tmp_path / "v1", 2), 1)
        await engine_when(store, serve, lambda s: s.policy_version == 1)
        made = await flying
        assert len(made.output_ids) == 1200
        assert [span.version for span in made.versions][-1] == 1

        broken = save_model(tmp_path / "v2", 3)
        files = write_manifest(broken, version=2)
        good = (broken / "model.safetensors").read_bytes()
        (broken / "model.safetensors").write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        await store.policy_versions.publish(
            PolicyVersion(id=2, step=2, location=str(broken), files=files, train_step=None)
        )
        refused = await engine_when(store, serve, lambda s: s.detail is not None)
        assert refused.policy_version == 1
        assert "model.safetensors" in str(refused.detail)
        assert (await session.generate([5], params.replace(max_new_tokens=4))).versions[0].version == 1

        await publish_delta(store, first, tmp_path / "v3", 3, seed=4)
        assert (await engine_when(store, serve, lambda s: s.policy_version == 3)).detail is None
        copy, whole = tmp_path / "copies" / store.run_name, load_file(tmp_path / "v3" / "whole" / WHOLE)
        for _ in range(600):  # the engine has changed its own weights; the copy follows
            state = copy / "state.json"
            if state.is_file() and json.loads(state.read_bytes())["version"] == 3:
                break
            await asyncio.sleep(0.05)
        copied = load_file(copy / "model" / WHOLE)
        assert all(copied[name].equal(value) for name, value in whole.items())
        assert (await session.generate([5], params.replace(max_new_tokens=4))).versions[0].version == 3
    await router.close()

    serve.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(serve.wait, 20) == 0
    assert await store.services.live(60.0) == []
    assert not psutil.pid_exists(service.pid)


async def test_a_restart_serves_the_newest_version_at_once(
    store: Store, start: Start, tmp_path: Path
) -> None:
    serve = start()
    first = await engine_when(store, serve, lambda s: s.status is ServiceStatus.READY)
    serve.kill()
    await asyncio.to_thread(serve.wait, 10)
    async with EngineClient(first.url) as client:
        deadline = asyncio.get_running_loop().time() + 10
        while await client.health():
            assert asyncio.get_running_loop().time() < deadline, "the engine outlived agentrl serve"
            await asyncio.sleep(0.05)
    await publish(store, save_model(tmp_path / "v1", 2), 1)
    shutil.rmtree(tmp_path / "base")
    again = start()
    service = await engine_when(store, again, lambda s: s.id != first.id and s.status is ServiceStatus.READY)
    assert service.policy_version == 1


async def test_it_follows_versions_in_a_trainers_memory_and_outlives_the_trainer(
    store: Store, start: Start, tmp_path: Path
) -> None:
    folders = {seed: save_model(tmp_path / f"m{seed}", seed) for seed in (2, 3, 4, 5)}
    tensors = {seed: load_file(folder / "model.safetensors") for seed, folder in folders.items()}
    holders = [LiveHolder(kind, torch.device("cpu")) for kind in ("tensor", "distributed")]
    greedy = SamplingParams(max_new_tokens=12, temperature=0.0, extra={"ignore_eos": True})

    async def hold(holder: LiveHolder, seed: int) -> int:
        live = holder.join([holder.hold(tensors[seed])])
        made = await publish_live(store, live, attempt=None, step=seed, train_step_id=None)
        return made.id

    async def serves(serve: subprocess.Popen[bytes], version: int, seed: int) -> InferenceService:
        service = await engine_when(
            store, serve, lambda s: (s.policy_version, s.status) == (version, ServiceStatus.READY)
        )
        async with EngineClient(service.url) as client:
            made = await client.generate([5, 6, 7], greedy, f"seed-{seed}")
        assert made.versions == (VersionSpan(version=version, start=0, end=12),)
        assert_logprobs(str(folders[seed]), [5, 6, 7], made)
        return service

    serve = start()
    await engine_when(store, serve, lambda s: s.status is ServiceStatus.READY)
    await publish(store, tmp_path / "base", 0)
    for holder, seed in zip(holders, (2, 3), strict=True):
        first = await serves(serve, await hold(holder, seed), seed)
    serve.kill()
    await asyncio.to_thread(serve.wait, 10)
    newest = await hold(holders[1], 4)
    late = start()
    await engine_when(store, late, lambda s: s.id != first.id and s.policy_version == newest)
    await serves(late, newest, 4)
    for holder in holders:
        holder.close()
    lost = holders[0].join([(await store.policy_versions.all())[1].live.shares[0]])  # type: ignore[union-attr]
    await publish_live(store, lost, attempt=None, step=5, train_step_id=None)
    refused = await engine_when(store, late, lambda s: s.detail is not None)
    assert refused.policy_version == newest
    await publish(store, folders[5], newest + 2)
    await serves(late, newest + 2, 5)


def run_serve(run: RunConfig, model: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    argv = [
        *(sys.executable, "-m", "agentrl", "serve", "--run_name", run.run_name),
        *("--db_connection_string", str(run.db_connection_string), "--log_dir", run.log_dir),
        *("--model_name_or_path", str(model), *more),
    ]
    return subprocess.run(argv, capture_output=True, text=True, timeout=100, check=False)


async def test_the_port_of_another_runs_engine_is_refused(
    store: Store, start: Start, run_config: RunConfig, drop_later: Callable[[str], object], tmp_path: Path
) -> None:
    engine = await engine_when(store, start(), lambda s: s.status is ServiceStatus.READY)
    other = replace(run_config, run_name=f"{run_config.run_name}_other")
    async with await open_store(other) as second:
        await publish(second, save_model(tmp_path / "v7", 7), 7)
        done = await asyncio.to_thread(
            run_serve, other, tmp_path / "base", "--port", engine.url.rpartition(":")[2]
        )
        assert await second.services.live(60.0) == []
    drop_later(other.run_name)
    assert done.returncode == 2, done.stderr
    assert "is in use by process" in done.stderr
    async with EngineClient(engine.url, instance=engine.instance) as client:
        assert (await client.model_info()).version == 0
        assert await client.instance() == engine.instance is not None


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ("local", "has no config.json"),
        ("sglang", "bash scripts/setup_sglang.sh"),
        ("vllm", "bash scripts/setup_vllm.sh"),
    ],
)
def test_what_cannot_be_served_ends_with_the_reason(
    engine: str, reason: str, run_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"AGENTRL_{engine.upper()}_VENV", str(tmp_path))
    model = tmp_path if engine == "local" else save_model(tmp_path / "model", seed=1)
    (model / "tokenizer.json").write_text("{}")
    done = run_serve(run_config, model, "--engine", engine)
    assert done.returncode == 2
    assert reason in done.stderr
