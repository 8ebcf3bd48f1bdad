"""Find or start an engine that serves one fixed policy."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.chat.model_folder import tokenizer_fingerprint
from agentrl.config.load import Configs
from agentrl.config.schema import EngineConfig, EvaluationConfig, ModelConfig, RunConfig, SamplingConfig
from agentrl.documents.images import Image
from agentrl.documents.model_call import PartialGeneration
from agentrl.documents.run import InferenceService
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.status import ServiceStatus
from agentrl.errors import EngineError
from agentrl.evaluation.policy import EvaluatedPolicy, hold_weights
from agentrl.inference.client import EngineClient
from agentrl.inference.engine import EncodedIds, Engine, Generation, Held, Progress, Router
from agentrl.inference.engines.clients import engine_client
from agentrl.inference.engines.commands import EngineProcess, engine_command, free_port
from agentrl.rollout.setup import live_engines
from agentrl.weights.local_copy import LocalCopy, weights_dir

if TYPE_CHECKING:
    from agentrl.store.client import Store


_UPDATE_SECONDS = 600.0
_POLL_SECONDS = 1.0
_STOP_SECONDS = 1.0
_NICE = 10
"""Priority of an own engine: it leaves the processors to the engines and the trainer of the run."""


class PolicyEngines:
    """The engines of an evaluation: live ones of the run that serve its version, or one of its own.

    An own engine is not registered: samplers and the trainer of the run do not see it.
    """

    def __init__(self, store: Store, configs: Configs) -> None:
        self._store = store
        self._configs = configs
        self._policy: EvaluatedPolicy | None = None
        self._starting = asyncio.Lock()
        self._own: _OwnEngine | None = None

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
                return [await self._own.serve(folder, policy)]
            finally:
                copy.release()

    @property
    def own_has_ended(self) -> str | None:
        """Return why the own engine has ended; None while it runs, and without one."""
        return None if self._own is None else self._own.ended

    async def close(self) -> None:
        """Stop the own engine."""
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


logger = logging.getLogger(__name__)

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
