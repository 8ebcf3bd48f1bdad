"""Kill trainer and engines and take the bucket away while weights travel over S3; compare what is served.

    bash scripts/chaos.sh --weights 240 --away 60

A trainer publishes deltas to a bucket, and two engines follow them from folders of their own: the processes
share MongoDB and the bucket, and no path. The trainer is killed in the middle of a publication, an engine's
``agentrl serve`` in the middle of an update, and the bucket is away for some seconds, in turns. At the end
the weights of every engine must be those of the newest version and of the trainer's checkpoint.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import logging
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from training_data import group
from waiting import comes_true

from agentrl.config.schema import RunConfig
from agentrl.documents.document import now
from agentrl.documents.run import InferenceService, PolicyVersion
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.status import ServiceStatus, TaskStatus, VersionStatus
from agentrl.documents.task import Task
from agentrl.inference.client import EngineClient
from agentrl.local.mongod import EmbeddedMongo
from agentrl.store.client import Store, open_store
from agentrl.weights.folder import TensorChecksum, weights_digest
from chaos.actors import Actor, environment
from chaos.bucket import Bucket
from chaos.report import Findings

logger = logging.getLogger(__name__)

Condition = Callable[[], bool | Awaitable[bool]]

RUN = "weights"
SITES = ("site-0", "site-1")
_READY_SECONDS = 90.0
_FOLLOW_SECONDS = 120.0
_CHANCE_SECONDS = 3.0
"""How long a kill waits for its moment; then it comes without."""
_GAP_SECONDS = (0.5, 2.0)
_LATENCY = 0.02
_PROMPT = [72, 101, 108, 108, 111]
_TOLERANCE = 0.1
"""Of a logprob in bfloat16."""


@dataclass(kw_only=True)
class Report(Findings):
    """What was done to the processes, and what was published."""

    faults: Counter[str] = field(default_factory=Counter)
    encodings: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    largest: dict[str, int] = field(default_factory=dict)
    """Encoding → bytes of the largest version."""

    def figures(self) -> list[str]:
        """Return the counts."""
        versions = {f"versions, {name}": number for name, number in sorted(self.encodings.items())}
        sizes = {f"bytes of the largest, {name}": size for name, size in self.largest.items()}
        counts = {**dict(sorted(self.faults.items())), "steps": self.steps, **versions, **sizes}
        return [f"{name:<46} {number:>10,}" for name, number in counts.items()]


class Delivery:
    """The trainer and the engines of one run in ``folder``, and the faults."""

    def __init__(self, folder: Path, seed: int, steps: int) -> None:
        self.folder = folder
        self.report = Report()
        self._rng = random.Random(seed)
        self._steps = steps
        self._actors: dict[str, Actor] = {}

    def prepare(self) -> None:
        """Give every place its own copy of the base model, in bfloat16."""
        import torch
        from tiny_policy import write_tiny_policy
        from transformers import AutoModelForCausalLM

        base = write_tiny_policy(self.folder / "base", hidden_size=64)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
        for place in ("trainer", *SITES):
            shutil.copytree(base, self.folder / place / "model")
            model.save_pretrained(self.folder / place / "model")

    async def fill(self, store: Store) -> None:
        """Store finalized groups for so many steps, and one task that is still being sampled."""
        names = [f"g{number}" for number in range(2 * self._steps)]
        await store.tasks.load([_task(order, name) for order, name in enumerate(names)])
        await store.tasks.load([_task(len(names), "open", TaskStatus.RUNNING)])
        data = [item.to_document() for name in names for item in group(name)]
        await store.database["DBRecordData"].insert_many(data)

    def start(self, uri: str, reach: dict[str, str]) -> None:
        """Start the trainer and the engines."""
        common = ["--run_name", RUN, "--db_connection_string", uri, "--heartbeat_seconds", "0.5"]
        out = str(self.folder / "trainer" / "out")
        own = {
            "trainer": [
                "train", "--output_dir", out, "--publish_to", Bucket.url, "--publish", "delta",
                "--groups_per_step", "2", "--num_generations", "2", "--learning_rate", "1e-5",
                "--max_staleness", "3", "--staleness_policy", "decay", "--out_of_date_decay", "0",
                "--save_steps", "2", "--verify_data", "false",
            ],
            **{
                site: [
                    "serve", "--engine", "local", "--max_total_tokens", "4096",
                    "--weights_dir", str(self.folder / site / "weights"),
                ]
                for site in SITES
            },
        }  # fmt: skip
        for name, words in own.items():
            place = self.folder / name
            where = ["--model_name_or_path", str(place / "model"), "--log_dir", str(place / "logs")]
            command = [sys.executable, "-m", "agentrl", *words, *common, *where]
            self._actors[name] = Actor(name, command, self.folder / f"{name}.log", {**environment(), **reach})
            self._actors[name].start()

    async def disturb(self, store: Store, bucket: Bucket, seconds: float, away: float) -> None:
        """Cause one fault after the other for ``seconds``, each kind at least once."""
        begun = time.monotonic()
        for turn in itertools.count():
            if turn >= 3 and time.monotonic() - begun > seconds:
                return
            await asyncio.sleep(self._rng.uniform(*_GAP_SECONDS))
            if turn % 3 == 0:
                await self._kill("trainer", lambda: self._is_publishing(store))
            elif turn % 3 == 1:
                site = self._rng.choice(SITES)
                await self._kill(site, lambda site=site: self._is_applying(site))  # type: ignore[misc]
            else:
                bucket.proxy.cut()
                await asyncio.sleep(away)
                bucket.proxy.restore()
                self.report.faults["bucket away"] += 1
            logger.info("fault %d: %s", turn + 1, dict(self.report.faults))
            await self._moves_on(store)

    async def _kill(self, name: str, moment: Condition) -> None:
        """Send SIGKILL at a ``moment``, and start the process again."""
        if not await comes_true(moment, _CHANCE_SECONDS, every=0.002):
            name += ", at rest"
        actor = self._actors[name.partition(",")[0]]
        if await actor.kill():
            self.report.faults[f"kill {name}"] += 1
            actor.start()
        else:
            self.report.violations.append(f"{actor.name} has ended by itself")

    async def _is_publishing(self, store: Store) -> bool:
        return await store.policy_versions.reserved() is not None

    def _is_applying(self, site: str) -> bool:
        for path in (self.folder / site).rglob("state.json"):
            try:
                return bool(json.loads(path.read_text(encoding="utf-8")).get("applying"))
            except (OSError, ValueError):
                return False
        return False

    async def _moves_on(self, store: Store) -> None:
        """Wait until another version is published."""
        newest = await store.policy_versions.latest()
        last = -1 if newest is None else newest.id

        async def is_newer() -> bool:
            found = await store.policy_versions.latest()
            return found is not None and found.id > last

        await self.reach(is_newer, _READY_SECONDS, "no newer version is published")

    async def reach(self, condition: Condition, seconds: float, otherwise: str) -> None:
        """Wait until ``condition`` holds. Raises RuntimeError with the ends of the logs."""
        if not await comes_true(condition, seconds, every=0.1):
            logs = (f"{path.name}:\n{path.read_text()[-2500:]}" for path in self.folder.glob("*.log"))
            raise RuntimeError(f"{otherwise} within {seconds:g} s\n" + "\n".join(logs))

    async def stop(self, name: str) -> int | None:
        """Stop a process with SIGTERM; return its exit code."""
        return await self._actors[name].stop(60.0)

    async def stop_all(self) -> None:
        """Stop what still runs."""
        await asyncio.gather(*(actor.stop(20.0) for actor in self._actors.values()))

    async def check(self, store: Store, bucket: Bucket) -> None:
        """Stop the trainer, wait until the engines have its last version, and compare all weights."""
        code = await self.stop("trainer")
        if code != 0:
            self.report.violations.append(f"the trainer ended with exit code {code}")
        newest = await store.policy_versions.latest()
        assert newest is not None

        async def follow() -> bool:
            return len(await _serving(store, newest.id)) == len(SITES)

        await self.reach(follow, _FOLLOW_SECONDS, f"not every engine serves version {newest.id}")
        await self._check_bucket(await store.policy_versions.all(), bucket)
        checkpoint = self.folder / "trainer" / "out" / f"checkpoint-{newest.step:06d}"
        found = next(iter(sorted(checkpoint.parent.glob(f"{checkpoint.name}*"), reverse=True)), None)
        trained = None if found is None else found / "model"
        if trained is None or digest(trained) != newest.digest:
            self.report.violations.append(f"version {newest.id} is not checkpoint {found}")
        for engine in await _serving(store, newest.id):
            await self._check_engine(engine, newest, trained or self.folder)
        await self._check_steps(store)

    async def _check_bucket(self, versions: list[PolicyVersion], bucket: Bucket) -> None:
        """Every published version whose files are kept is whole."""
        for version in versions:
            self.report.encodings[version.encoding] += 1
            size = max(self.report.largest.get(version.encoding, 0), version.bytes)
            self.report.largest[version.encoding] = size
            kept = version.status is VersionStatus.PUBLISHED and version.pruned_at is None
            for file in version.files if kept and version.location.startswith("s3://") else ():
                data = await bucket.read(f"{version.location}/{file.name}")
                if data is None or hashlib.sha256(data).hexdigest() != file.sha256:
                    self.report.violations.append(f"version {version.id}: {file.name} is missing or damaged")

    async def _check_engine(self, engine: InferenceService, newest: PolicyVersion, trained: Path) -> None:
        def follow() -> bool:  # an engine changes its own weights before its host's copy
            return sum(digest(path) == newest.digest for path in self._copies()) == len(SITES)

        await self.reach(follow, _FOLLOW_SECONDS, f"not every copy holds version {newest.id}")
        async with EngineClient(engine.url, instance=engine.instance) as client:
            made = await client.generate(
                _PROMPT, SamplingParams(max_new_tokens=8, extra={"ignore_eos": True}), "chaos"
            )
        gap = await asyncio.to_thread(_gap, trained, made.output_ids, made.logprobs)
        if not gap < _TOLERANCE:
            self.report.violations.append(f"logprobs of {engine.id} differ by {gap:.2g} from the trainer's")

    def _copies(self) -> list[Path]:
        found = (path.parent for site in SITES for path in (self.folder / site).rglob("*.safetensors"))
        return sorted({path for path in found if path.parent.name not in SITES})

    async def _check_steps(self, store: Store) -> None:
        steps = await store.steps.find()
        self.report.steps = len(steps)
        counted = Counter(item for step in steps for item in step.data)
        stored = {
            item["_id"]: item["trained_count"]
            async for item in store.database["DBRecordData"].find({"trained_count": {"$gt": 0}})
        }
        if set(counted.values()) != {1} or stored != dict(counted):
            self.report.violations.append("training data are trained twice, or lost")


def digest(folder: Path) -> str:
    """Return the digest of the tensors in the safetensors files of ``folder``."""
    from safetensors.torch import load_file

    tensors = {
        name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()
    }
    return weights_digest({name: TensorChecksum.of(tensor) for name, tensor in tensors.items()})


def _gap(folder: Path, output: tuple[int, ...], logprobs: tuple[float, ...]) -> float:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([[*_PROMPT, *output]])).logits[0, len(_PROMPT) - 1 : -1]
    own = logits.log_softmax(-1)[torch.arange(len(output)), list(output)]
    return float((own - torch.tensor(logprobs)).abs().max())


async def _serving(store: Store, version: int) -> list[InferenceService]:
    live = await store.services.live(3.0)
    return [item for item in live if (item.policy_version, item.status) == (version, ServiceStatus.READY)]


def _task(order: int, name: str, status: TaskStatus = TaskStatus.COMPLETED) -> Task:
    summary = {
        "scored": 2, "failed": 0, "mean_score": 0.5, "pass_rate": 0.5, "trained": 2, "finalized_at": now(),
    }  # fmt: skip
    return Task(
        id=name, task_id=name, split="train", epoch=0, order=order, query="q", status=status, group=summary
    )


async def run_weight_delivery(
    folder: Path, seconds: float, *, away: float, seed: int = 0, steps: int = 2000
) -> Report:
    """Disturb the delivery of weights for ``seconds``; return the report. The bucket is ``away`` in turns."""
    delivery = Delivery(folder, seed, steps)
    await asyncio.to_thread(delivery.prepare)
    mongo, bucket = EmbeddedMongo(folder / "mongo"), Bucket(folder / "bucket.log")
    uri = (await asyncio.to_thread(mongo.up)).uri
    try:
        reach = await bucket.start()
        bucket.proxy.latency = _LATENCY
        async with await open_store(RunConfig(run_name=RUN, db_connection_string=uri)) as store:
            await delivery.fill(store)
            delivery.start(uri, reach)

            async def ready() -> bool:
                return len(await store.services.live(3.0)) == len(SITES) and bool(await store.steps.find())

            await delivery.reach(ready, _READY_SECONDS, "the processes do not run")
            await delivery.disturb(store, bucket, seconds, away)
            await delivery.check(store, bucket)
    finally:
        await delivery.stop_all()
        await bucket.stop()
        await asyncio.to_thread(mongo.down)
    return delivery.report
