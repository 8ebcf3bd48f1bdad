"""Find the policy to evaluate, and find or start an engine that serves it and no other.

A policy is a version of the run, a checkpoint, or a model folder.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.base.concurrency import end_tasks
from agentrl.chat.model_folder import tokenizer_fingerprint
from agentrl.columns.pool import count_gpus
from agentrl.config.load import Configs
from agentrl.config.schema import EngineConfig, EvaluationConfig, ModelConfig, RunConfig, SamplingConfig
from agentrl.documents.document import plain
from agentrl.documents.images import Image
from agentrl.documents.model_call import PartialGeneration
from agentrl.documents.run import OUTSIDE_VERSION, InferenceService, PolicyVersion
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.status import ServiceStatus, VersionStatus
from agentrl.documents.training import is_checkpoint
from agentrl.errors import EngineError, ModelError, PublishError
from agentrl.inference.client import EngineClient
from agentrl.inference.engine import EncodedIds, Engine, Generation, Held, Progress, Router
from agentrl.inference.engines.clients import engine_client
from agentrl.inference.engines.commands import EngineProcess, engine_command, free_port
from agentrl.rollout.setup import live_engines
from agentrl.store.evaluations import digest
from agentrl.weights.folder import checksums, is_adapter, merged_model
from agentrl.weights.local_copy import LocalCopy, chain_to, is_in_place, weights_dir
from agentrl.weights.storage import is_remote

if TYPE_CHECKING:
    from agentrl.store.client import Store

logger = logging.getLogger(__name__)

_NEWEST = 8
"""Published versions that are searched for a folder on this machine, and that errors list."""
_NAME_LENGTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedPolicy:
    """Weights to evaluate. ``folder`` is None if this machine has no model folder with them."""

    version: int | None
    """The policy version; None for a model folder."""
    step: int | None = None
    folder: str | None
    is_stored: bool = True
    """Whether its weights are in ``folder``, or can be copied to this machine."""
    digest: str | None = None
    """Hash of the files of a model folder."""

    @property
    def name(self) -> str:
        """Return the part of an evaluation's id that names the policy: ``v000007`` or ``m3fa9c1d2``."""
        if self.version is not None:
            return f"v{self.version:06d}"
        return f"m{(self.digest or '')[:_NAME_LENGTH]}"

    @property
    def token_version(self) -> int:
        """Return the version that engines report for its tokens."""
        return OUTSIDE_VERSION if self.version is None else self.version

    def __str__(self) -> str:
        """Return the policy as text for people."""
        return f"policy version {self.version}" if self.version is not None else f"model {self.folder}"


async def find_version(store: Store, version: int, base: str | None) -> EvaluatedPolicy:
    """Return a published version, or version 0 of a run that has only ``base``. Raises ModelError."""
    published = await store.policy_versions.get(version)
    if published is None and version == 0 and base is not None:
        return EvaluatedPolicy(version=0, step=0, folder=_local_folder(base) or base)
    if published is None or published.status is VersionStatus.RESERVED:
        raise ModelError(
            f"run {store.run_name!r} has no policy version {version}",
            hint=f"published versions: {await _known(store)}",
        )
    return of_published(published)


def of_published(version: PolicyVersion) -> EvaluatedPolicy:
    """Return the policy of a version; its weights may be deleted, or in a folder of another machine."""
    is_near = is_remote(version.location) or Path(version.location).is_dir()
    is_there = version.pruned_at is None and version.is_stored and is_near
    return EvaluatedPolicy(
        version=version.id,
        step=version.step,
        folder=version.location if is_there and is_in_place(version) else None,
        is_stored=is_there,
    )


async def hold_weights(store: Store, policy: EvaluatedPolicy, copy: LocalCopy) -> str:
    """Return the folder of a policy, in ``copy`` if it has none; that changes only after ``copy.release``.

    An adapter is merged into its base.
    Raises ModelError if its weights were deleted, are elsewhere or cannot be copied.
    """
    if policy.folder is not None:
        return policy.folder
    version = None if policy.version is None else await store.policy_versions.get(policy.version)
    if version is not None and of_published(version).is_stored:
        try:
            held, folder = await copy.hold(store, version)
            if held.encoding == "adapter":
                whole = (await chain_to(store, held))[0]
                return str(await merged_model(Path(folder), whole.location))
            return folder
        except PublishError as error:
            raise ModelError(error.message, hint=error.hint) from error
    if version is not None and version.pruned_at is not None:
        raise ModelError(
            f"the weights of policy version {version.id} were deleted at {version.pruned_at:%Y-%m-%d %H:%M}",
            hint=f"versions with weights: {await _known(store)}; --keep_every of `agentrl train` keeps more",
        )
    where = "its folder" if version is None else version.location
    raise ModelError(
        f"the weights of {policy} are not on this machine: {where} is not a folder",
        hint="run the evaluation where the folder is, or where an engine serves the version",
    )


async def find_model(store: Store, named: str, base: str | None) -> EvaluatedPolicy:
    """Return the model in a folder or a checkpoint; the adapter of a checkpoint is merged first.

    Raises ModelError if it has no weights or no tokenizer, or another tokenizer than the run's model.
    """
    given = Path(named)
    adapter = given / "model" if is_checkpoint(given) else given
    if is_adapter(adapter):
        given = await merged_model(adapter, base)
    folder = await asyncio.to_thread(model_of, given)
    files = await asyncio.to_thread(checksums, folder)
    await _require_tokenizer(store, folder, base)
    return EvaluatedPolicy(version=None, folder=str(folder), digest=digest(plain(files)))


def require_model(given: Path) -> None:
    """Raise ModelError unless ``given`` is what ``find_model`` reads; asks no database."""
    if not is_adapter(given / "model" if is_checkpoint(given) else given):
        model_of(given)


def model_of(folder: Path) -> Path:
    """Return the model folder of ``folder``, which may be a checkpoint. Raises ModelError."""
    if not folder.is_dir():
        raise ModelError(f"--eval_model is {folder}, which is not a folder", hint="give a model folder")
    model = folder / "model" if is_checkpoint(folder) else folder
    for name, pattern in (
        ("config.json", "config.json"), ("weights", "*.safetensors"), ("tokenizer.json", "tokenizer.json"),
    ):  # fmt: skip
        if not any(model.glob(pattern)):
            raise ModelError(
                f"{model} has no {name} ({pattern})",
                hint="give a Hugging Face folder: config.json, *.safetensors and tokenizer.json",
            )
    return model.resolve()


async def _require_tokenizer(store: Store, folder: Path, base: str | None) -> None:
    reference = _local_folder(base)
    if reference is None:  # the newest version whose weights are on this machine
        published = await store.policy_versions.published(_NEWEST)
        reference = next((item.location for item in published if of_published(item).folder), None)
    if reference is None:
        return
    wanted = await asyncio.to_thread(tokenizer_fingerprint, reference)
    actual = await asyncio.to_thread(tokenizer_fingerprint, folder)
    if wanted is not None and actual != wanted:
        raise ModelError(
            f"{folder} has another tokenizer ({actual}) than the run's model in {reference} ({wanted})",
            hint="evaluate it in a run of its own (--run_name), and compare with `agentrl eval compare`",
        )


async def _known(store: Store) -> str:
    """Return the newest versions that still have weights, as text."""
    versions = [item.id for item in await store.policy_versions.published(100) if item.pruned_at is None]
    more = ", …" if len(versions) > _NEWEST else ""
    return ", ".join(map(str, versions[:_NEWEST])) + more if versions else "none"


def _local_folder(base: str | None) -> str | None:
    """Return the absolute path of ``base`` if it is a folder."""
    return str(Path(base).resolve()) if base is not None and Path(base).is_dir() else None


_UPDATE_SECONDS = 600.0
_POLL_SECONDS = 1.0
_STOP_SECONDS = 1.0
_NICE = 10
"""Priority of an own engine: it leaves the processors to the engines and the trainer of the run."""


class PolicyEngines:
    """The engines of an evaluation: live ones of the run that serve its version, or one of its own.

    An own engine is not registered: samplers and the trainer of the run do not see it. Costs count it.
    """

    def __init__(self, store: Store, configs: Configs) -> None:
        self._store = store
        self._configs = configs
        self._policy: EvaluatedPolicy | None = None
        self._starting = asyncio.Lock()
        self._own: _OwnEngine | None = None
        self._counting: asyncio.Task[None] | None = None

    async def serve(self, policy: EvaluatedPolicy) -> None:
        """Make sure that some engine serves ``policy``; start one unless ``--eval_engine`` is shared."""
        self._policy = policy
        if not await self.live() and self._configs[EvaluationConfig].eval_engine == "shared":
            await wait_for_shared(self._store, self._configs, policy.version, tell=lambda _: None)

    async def live(self) -> Sequence[InferenceService]:
        """Return the engines that serve the policy; start an own one if there is none and flags allow it.

        Raises ModelError if the weights are not there, and EngineError if the engine does not start.
        """
        policy = self._policy
        assert policy is not None
        mode = self._configs[EvaluationConfig].eval_engine
        if mode != "own" and policy.version is not None:
            shared = await live_engines(self._store, self._configs[EngineConfig], policy.version)
            if shared or mode == "shared":
                return shared
        async with self._starting:
            if self._own is not None and (service := self._own.serving(policy)) is not None:
                return [service]
            # Not that of the run's engines: it would take them away from the newest version.
            root = await weights_dir(self._store, self._configs[EngineConfig].weights_dir)
            copy = LocalCopy(root / "evaluation", is_exact=True)
            folder = await hold_weights(self._store, policy, copy)
            try:
                if self._own is None:
                    self._own = _OwnEngine(self._configs, folder, policy)
                    gpus = self._configs[EngineConfig].inf_tp_size
                    self._counting = asyncio.create_task(count_gpus(self._store, gpus), name="count-gpus")
                return [await self._own.serve(folder, policy)]
            finally:
                copy.release()

    @property
    def own_has_ended(self) -> str | None:
        """Return why the own engine has ended; None while it runs, and without one."""
        return None if self._own is None else self._own.ended

    async def close(self) -> None:
        """Stop the own engine."""
        if self._counting is not None:
            await end_tasks(self._counting)
        if self._own is not None:
            await self._own.close()


class _OwnEngine:
    """An engine process that serves one policy at a time."""

    def __init__(self, configs: Configs, folder: str, policy: EvaluatedPolicy) -> None:
        run, model = configs[RunConfig], configs[ModelConfig]
        self._config = dataclasses.replace(configs[EngineConfig], host="127.0.0.1", port=0)
        port = free_port(self._config.host)
        command = engine_command(folder, model, self._config, port)
        nice = ["nice", "-n", str(_NICE), *command.argv]
        log = Path(run.log_dir) / f"{run.run_name}_eval_engine_{os.getpid()}.log"
        self._process = EngineProcess(dataclasses.replace(command, argv=nice), log)
        self._client: EngineClient = engine_client(
            self._config.engine, f"http://{self._config.host}:{port}", _UPDATE_SECONDS
        )
        self._loaded = policy
        self._service: InferenceService | None = None
        self._served: EvaluatedPolicy | None = None

    @property
    def ended(self) -> str | None:
        """Return the exit code and the last lines of the log; None while it runs."""
        code = self._process.returncode
        if code is None:
            return None
        return f"the engine of the evaluation ended with exit code {code}:\n{self._process.log_tail()}"

    def serving(self, policy: EvaluatedPolicy) -> InferenceService | None:
        """Return the engine as samplers see engines, if it serves ``policy``."""
        return self._service if self._served == policy else None

    async def serve(self, folder: str, policy: EvaluatedPolicy) -> InferenceService:
        """Load ``policy`` from ``folder``; return the engine as samplers see engines."""
        await self._process.wait_ready(self._client, self._config.engine_start_seconds)
        if self._loaded != policy:
            await self._client.update_weights(folder, policy.token_version)
            self._loaded = policy
        await self._client.set_version(policy.token_version)
        info = await self._client.model_info()
        self._served = policy
        self._service = InferenceService(
            id=f"eval-{os.getpid()}",
            url=self._client.url,
            engine=self._config.engine,
            model=folder,
            status=ServiceStatus.READY,
            policy_version=policy.token_version,
            context_length=info.context_length,
            tokenizer=await asyncio.to_thread(tokenizer_fingerprint, folder),
            host=socket.gethostname(),
            pid=self._process.pid,
            instance=self._process.instance,
        )
        return self._service

    async def close(self) -> None:
        await self._client.close()
        await self._process.stop(_STOP_SECONDS)


async def wait_for_shared(
    store: Store, configs: Configs, wanted: int | None, *, tell: Callable[[str], None]
) -> int:
    """Wait until a live engine serves ``wanted`` (None: any version); return the newest such version.

    ``tell`` receives what live engines serve. Raises EngineError after ``--engine_wait_seconds``.
    """
    limit = configs[SamplingConfig].engine_wait_seconds
    served: set[int] = set()
    try:
        async with asyncio.timeout(limit):
            while True:
                served = await shared_versions(store, configs)
                if wanted in served or (wanted is None and served):
                    return max(served) if wanted is None else wanted
                tell(f"live engines serve {_listed(served)}" if served else "no engine is alive")
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError as error:
        what = "any policy version" if wanted is None else f"policy version {wanted}"
        serving = f"; live engines serve {_listed(served)}" if served else ""
        raise EngineError(
            f"no live engine serves {what} after {limit:g} s{serving}",
            hint="start one: agentrl serve --run_name … --model_name_or_path …, or give --eval_engine own",
        ) from error


def _listed(versions: Collection[int]) -> str:
    return ", ".join(map(str, sorted(versions)))


async def shared_versions(store: Store, configs: Configs) -> set[int]:
    """Return the versions that live engines of the run serve; an engine that starts serves none yet."""
    return {
        item.policy_version
        for item in await live_engines(store, configs[EngineConfig])
        if item.policy_version is not None and item.status is not ServiceStatus.STARTING
    }


_ATTEMPTS = 5


class FixedVersionRouter:
    """The engines of one version: a model call during which an engine loads another one is repeated."""

    def __init__(self, router: Router, version: int) -> None:
        self._router = router
        self._version = version

    @asynccontextmanager
    async def session(
        self,
        traj_id: str,
        group: str | None = None,
        partial: PartialGeneration | None = None,
        held: Held = nullcontext,
    ) -> AsyncIterator[Engine]:
        """Open a session of one trajectory, as the router does."""
        async with self._router.session(traj_id, group, partial, held) as engine:
            yield _FixedVersionEngine(engine, self._version)


class _FixedVersionEngine:
    """The engine of one trajectory."""

    def __init__(self, engine: Engine, version: int) -> None:
        self._engine = engine
        self._version = version

    @property
    def context_length(self) -> int | None:
        """Return the largest number of tokens of a prompt and its continuation; None if it is unknown."""
        return self._engine.context_length

    @property
    def partial(self) -> PartialGeneration | None:
        """The tokens of an unfinished call."""
        return self._engine.partial

    @partial.setter
    def partial(self, value: PartialGeneration | None) -> None:
        self._engine.partial = value

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        progress: Progress | None = None,
        images: Sequence[Image] = (),
        encoded: EncodedIds | None = None,
        *,
        routed_from: int | None = None,
    ) -> Generation:
        """Sample a continuation of ``input_ids``. Raises EngineError if no engine stays at the version.

        Evaluations are not trained: no routing is asked for.
        """
        for _ in range(_ATTEMPTS):
            generation = await self._engine.generate(input_ids, params, progress, images, encoded)
            others = {span.version for span in generation.versions} - {self._version}
            if not others:
                return generation
            self._engine.partial = None
            logger.warning("a model call with tokens of version %s is repeated", sorted(others))
        raise EngineError(
            f"{_ATTEMPTS} model calls in a row had tokens of another version than {self._version}",
            hint="give --eval_engine own",
        )
