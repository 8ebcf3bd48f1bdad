"""Two runs train adapters of one model and share one local engine; each samples with its own adapters."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from served_engine import Served, serve_locally
from tiny_policy import write_tiny_policy
from waiting import until
from written_adapter import write_served

from agentrl.config.schema import AdapterConfig, EngineConfig, ModelConfig, RunConfig
from agentrl.documents.model_call import VersionSpan
from agentrl.documents.run import PolicyVersion
from agentrl.documents.sampling import SamplingParams
from agentrl.errors import EngineError
from agentrl.inference.engine import EngineRefusedError, Generation
from agentrl.inference.engines.clients import AttachedEngine, engine_client
from agentrl.inference.served_engine import ServedEngine, ServedWeights, starting_weights
from agentrl.inference.session import EngineRouter
from agentrl.model.load import Policy, load_policy
from agentrl.store.client import Store, open_store
from agentrl.weights.folder import checksums
from agentrl.weights.local_copy import LocalCopy
from agentrl.weights.publish import publish_base

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240), pytest.mark.usefixtures("starts_warm")]

PROMPT = [n * 7919 % 200 for n in range(40)]
LONG = SamplingParams(max_new_tokens=1500, extra={"ignore_eos": True})
SHORT = SamplingParams(max_new_tokens=12, extra={"ignore_eos": True})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_tiny_policy(tmp_path_factory.mktemp("base") / "tiny", hidden_size=64)
    with serve_locally(folder, max_total_tokens=8192) as served:
        yield served


@dataclasses.dataclass
class Run:
    """A run with a served engine: the adapters that its trainer has published."""

    store: Store
    served: Served
    router: EngineRouter
    root: Path
    policies: dict[int, Policy] = dataclasses.field(default_factory=dict)

    async def publish(self, version: int, seed: int) -> None:
        """Publish a new adapter as the trainer does."""
        folder = self.root / f"v{version}"
        folder.mkdir(parents=True)
        self.policies[version] = write_adapter(self.served.folder, folder, seed)
        document = PolicyVersion(
            id=version, step=version, location=str(folder), files=checksums(folder), encoding="adapter",
            base=0, train_step=None,
        )  # fmt: skip
        await self.store.policy_versions.publish(document)

    async def generate(self, params: SamplingParams = SHORT) -> Generation:
        async with self.router.session("t", "g") as session:
            return await session.generate(PROMPT, params)

    async def serves(self, version: int) -> None:
        """Wait until samplers see the engine with ``version``."""

        async def known() -> bool:
            await self.router.engines.refresh()
            return self.router.engines.policy_versions() == {version}

        await until(known)

    def gap(self, made: Generation, version: int) -> float:
        """Return the largest |Δlogprob| between the engine and the trainer's unmerged forward."""
        ids = torch.tensor([[*PROMPT, *made.output_ids]])
        with torch.no_grad():
            logprobs = self.policies[version].model(ids).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
        ours = logprobs.gather(-1, torch.tensor(made.output_ids)[:, None])[:, 0]
        return float((ours - torch.tensor(made.logprobs)).abs().max())


async def served_requests(served: Served) -> None:
    """Wait until the engine has begun a request."""
    async with engine_client("local", served.url) as client:

        async def begun() -> bool:
            return (await client.load()).requests > 0

        await until(begun)


def write_adapter(base: Path, folder: Path, seed: int) -> Policy:
    config = ModelConfig(model_name_or_path=str(base))
    policy = load_policy(config, adapter=AdapterConfig(lora_rank=4))
    assert policy.adapter is not None
    torch.manual_seed(seed)
    for name, value in policy.adapter.named_parameters():
        if ".lora_B." in name:
            value.data.normal_(std=0.3)
    write_served(policy.adapter, folder)
    return policy


@asynccontextmanager
async def attached(config: RunConfig, served: Served, root: Path) -> AsyncIterator[Run]:
    """Attach a run to the engine, as `agentrl serve --engine_url` does."""
    engines = EngineConfig(heartbeat_seconds=0.1)
    async with await open_store(config) as store, engine_client("local", served.url, 30.0) as client:
        await publish_base(store, served.folder)
        copy = LocalCopy(root / "copy")
        version, folder, first = await starting_weights(store, ModelConfig(), copy)
        weights = ServedWeights(
            client, store, copy, run_name=config.run_name, version=version, folder=folder, is_shared=True
        )
        process = await AttachedEngine.find(client, folder, 30.0)
        engine = ServedEngine(store, client, process, engines, service_id="e", weights=weights, first=first)
        task = asyncio.create_task(engine.run())
        router = EngineRouter(lambda: store.services.live(30.0), max_age=0.05, wait_seconds=30.0)
        try:
            yield Run(store, served, router, root)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await weights.leave()
            await router.close()


async def test_two_runs_share_an_engine_and_its_base(
    served: Served, run_config: RunConfig, drop_later: Callable[[str], object], tmp_path: Path
) -> None:
    other = dataclasses.replace(run_config, run_name=run_config.run_name + "b")
    for config in (run_config, other):
        drop_later(config.run_name)
    async with attached(run_config, served, tmp_path / "a") as first:
        await first.serves(0)
        plain = await first.generate()
        assert plain.versions == (VersionSpan(version=0, start=0, end=12),)
        async with attached(other, served, tmp_path / "b") as second:
            await asyncio.gather(first.publish(1, seed=1), second.publish(1, seed=2))
            await asyncio.gather(first.serves(1), second.serves(1))
            mine, theirs = await asyncio.gather(first.generate(), second.generate())
            assert first.gap(mine, 1) < 1e-4 < 1e-2 < first.gap(theirs, 1)
            assert second.gap(theirs, 1) < 1e-4
            assert mine.cached_tokens == theirs.cached_tokens == 0  # the base has the prompt in its cache
            long = asyncio.create_task(first.generate(LONG))
            await served_requests(served)  # on a slow machine it would begin with version 2
            await first.publish(2, seed=3)
            await first.serves(2)
            newer = await first.generate()
            assert newer.versions == (VersionSpan(version=2, start=0, end=12),)
            assert first.gap(newer, 2) < 1e-4
            older = await long  # it finishes with the adapter that it began with, without a pause
            assert older.versions == (VersionSpan(version=1, start=0, end=1500),)
            assert first.gap(older, 1) < 1e-3
        async with engine_client("local", served.url) as client:
            loaded = await client.load_adapter("look@1", str(tmp_path / "a" / "v1"))
            assert loaded == {"look@1", f"{run_config.run_name}@1", f"{run_config.run_name}@2"}
            await client.unload_adapter("look@1")
            client.adapter = "gone@1"  # a call that names an unloaded adapter is repeated, not refused
            with pytest.raises(EngineError, match="gone@1") as raised:
                await client.generate(PROMPT, SHORT, "r")
            assert not isinstance(raised.value, EngineRefusedError)
        services = await first.store.services.live(30.0)
        assert [(each.policy_version, each.adapter) for each in services] == [(2, f"{run_config.run_name}@2")]


async def test_a_run_of_another_model_or_of_whole_weights_is_refused(
    served: Served, run_config: RunConfig, drop_later: Callable[[str], object], tmp_path: Path
) -> None:
    drop_later(run_config.run_name)
    other = write_tiny_policy(tmp_path / "other", hidden_size=32)
    async with engine_client("local", served.url) as client:
        with pytest.raises(EngineError, match=r"config.json, model.safetensors differ"):
            await AttachedEngine.find(client, str(other), 1.0)
    async with attached(run_config, served, tmp_path / "a") as run:
        await run.serves(0)
        whole = PolicyVersion(id=1, step=1, location=str(other), files=checksums(other), train_step=None)
        await run.store.policy_versions.publish(whole)

        async def refused() -> bool:
            services = await run.store.services.live(30.0)
            return "other runs may use" in (services[0].detail or "")

        await until(refused)
        assert (await run.generate()).versions[0].version == 0
