"""``agentrl parity``: compares the trainer's logprobs with an engine's, for the same token ids and weights.

The engine samples. The trainer computes the logprobs of the sampled tokens with its own forest and logprob
code, once per attention executor. The exit code is 1 when the mean of |Δlogprob| reaches the limit anywhere.

The engine is also compared with itself: are its logprobs those of a request alone, however many others run?
Only then could the two be equal to the last bit: https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType

from agentrl.config.flags import Flags, flag
from agentrl.config.load import CommandParser, group_of
from agentrl.config.schema import EngineConfig, MemoryConfig, ModelConfig
from agentrl.errors import ConfigError, EngineError
from agentrl.observe.logging import quiet_transformers
from agentrl.observe.terminal import plain, print_json, stdout_console, table
from agentrl.weights.folder import base_folder

if TYPE_CHECKING:
    from agentrl.documents.model_call import ExpertShape
    from agentrl.documents.sampling import SamplingParams
    from agentrl.inference.client import EngineClient
    from agentrl.inference.engine import Generation
    from agentrl.model.load import Policy

MEAN_LIMIT = 1e-3
"""The mean of |Δlogprob| must stay below this, in nats."""
BFLOAT16_LIMIT = 2e-2
"""The same for products in bfloat16, which trainer and engine round in different places."""
FP8_LIMIT = 0.5
"""The same for an engine with weights in fp8, which the loss corrects for."""


@dataclass(frozen=True)
class ParityDifference:
    """|Δlogprob| between trainer and engine over all generated tokens, in nats."""

    engine: str
    executor: str
    tokens: int
    mean: float
    p99: float
    max: float
    kl: float
    """KL(μ‖π), by the k3 estimate, in nats per token."""
    limit: float = MEAN_LIMIT
    """What the mean must stay below."""
    routing: Literal["", "own", "replayed"] = ""
    """Of a mixture: the trainer's own choice of experts, or the engine's, replayed as in training."""
    batch_max: float | None = None
    """The engine against itself, in nats: see ``batch_spread``."""

    @classmethod
    def of(
        cls,
        engine: str,
        executor: str,
        ours: NDArray[Any],
        theirs: NDArray[Any],
        limit: float = MEAN_LIMIT,
        routing: Literal["", "own", "replayed"] = "",
    ) -> ParityDifference:
        """Compare the logprobs of the same tokens, float[T] each."""
        from agentrl.losses.loss import k3

        log_ratio = np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)
        delta = np.abs(log_ratio)
        p99, kl = float(np.quantile(delta, 0.99)), float(k3(log_ratio).mean())
        mean, largest = float(delta.mean()), float(delta.max())
        return cls(engine, executor, len(delta), mean, p99, largest, kl, limit, routing)

    @property
    def within(self) -> bool:
        """Whether the mean is below the limit; False for NaN."""
        return self.mean < self.limit


def render(differences: Sequence[ParityDifference], model: str) -> RenderableType:
    """Return a table with a row per difference, of which there is one at least, and a line per engine."""
    rows = [
        [
            item.engine, f"{item.executor}, {item.routing} routing" if item.routing else item.executor,
            item.tokens, f"{item.mean:.2e}", f"{item.p99:.2e}", f"{item.max:.2e}",
            f"{item.kl:.2e}", "within" if item.within else "above",
        ]
        for item in differences
    ]  # fmt: skip
    columns = [
        "engine",
        "executor",
        "tokens",
        "mean",
        "p99",
        "max",
        "KL(μ‖π)",
        f"mean < {differences[0].limit:g}",
    ]
    spreads = {item.engine: item.batch_max for item in differences}
    return Group(
        table(f"|Δlogprob| between trainer and engine, {model}", columns, rows, text=2),
        *(
            plain(
                f"{engine}, batch-invariant over 1…{MAX_BATCH}: "
                + ("yes" if spread == 0 else f"no, |Δlogprob| up to {spread:.2e}")
            )
            for engine, spread in spreads.items()
            if spread is not None
        ),
    )


MAX_BATCH = 64
"""Requests of the largest batch in which an engine is compared with itself."""
_BATCH_TOKENS = 8
_GENERATE_SECONDS = 600.0
_QUESTIONS = (
    "What is 17 times 23?",
    "Name three rivers of Europe and the seas that they reach.",
    "Write a short letter that asks a neighbor to water the plants for two weeks in July.",
    "Explain why the sky is blue.",
    "Sort these words: pear, apple, fig, cherry.",
    "def add(a, b):\n    return a + b\n\nWhat does this function do?",
    "Übersetze „good morning“ ins Deutsche, Französische und Japanische.",
    "Tell a story that begins with a locked door.",
)


@dataclass(frozen=True)
class Sample:
    """A prompt, the engine's output, and the engine's logprobs of the output."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    logprobs: tuple[float, ...]
    sampling_mask: bytes = b""
    """The ids that each token was sampled from, if ``--top_p``, ``--top_k`` or ``--min_p`` left some out."""
    routing: bytes = b""
    """The experts of each token but the last, of a mixture."""


@dataclass(frozen=True, kw_only=True)
class ParityFlags(Flags):
    """Which engines are compared, and on how much text."""

    engine: str = flag("local", "engines to start: local, sglang, vllm, or several")
    url: str | None = flag(None, "URL of a running engine of that kind with the same weights")
    prompts: int = flag(16, "number of prompts", within="[1, inf)")
    max_new_tokens: int = flag(64, "tokens generated per prompt", within="[1, inf)")
    temperature: float = flag(1.0, "temperature of sampling and of the logprobs")
    top_p: float = flag(1.0, "sample from the most likely tokens with this probability", within="(0, 1]")
    top_k: int = flag(-1, "sample from this many tokens (-1: all)", within="[-1, inf)")
    min_p: float = flag(0.0, "sample from tokens of this probability over the largest", within="[0, 1]")
    dtype: Literal["float32", "bfloat16"] = flag("float32", "dtype of the weights")
    json: bool = flag(False, "print JSON")


def main(argv: list[str]) -> int:
    """Print the table; 1 when a mean reaches the limit of ``--dtype``."""
    parser = CommandParser(
        prog="agentrl parity",
        description="Compares the trainer's logprobs with an engine's, for the same token ids and weights.",
    )
    parser.add_flags(ModelConfig, "model_name_or_path", required=True)
    parser.add_flags(ParityFlags)
    parser.add_flags(ModelConfig, "chat_template", "router_replay")
    parser.add_flags(EngineConfig, "engine_start_seconds", "rollout_quantization")
    arguments = parser.parse_args(argv)
    flags = group_of(ParityFlags, arguments)
    model = ModelConfig(
        model_name_or_path=os.path.abspath(arguments.model_name_or_path),
        dtype=flags.dtype,
        chat_template=arguments.chat_template,
        router_replay=arguments.router_replay,
    )
    config = EngineConfig(
        engine_start_seconds=arguments.engine_start_seconds,
        rollout_quantization=arguments.rollout_quantization,
    )
    differences = asyncio.run(_compare(model, flags, config))
    if flags.json:
        print_json(differences)
    else:
        stdout_console().print(render(differences, arguments.model_name_or_path))
    return 0 if all(difference.within or difference.routing == "own" for difference in differences) else 1


async def _compare(model: ModelConfig, flags: ParityFlags, config: EngineConfig) -> list[ParityDifference]:
    base_folder(model)  # refuses a wrong folder before torch is imported
    from agentrl.distributed.build_policy import build_replay
    from agentrl.distributed.mesh import single_process
    from agentrl.documents.sampling import SamplingParams
    from agentrl.model.load import load_policy

    quiet_transformers()
    policy = load_policy(model)
    policy.model.requires_grad_(False).to(single_process().device)  # type: ignore[arg-type]
    limit = BFLOAT16_LIMIT if model.dtype == "bfloat16" else MEAN_LIMIT
    if config.rollout_quantization == "fp8":
        limit = FP8_LIMIT
    params = SamplingParams(
        temperature=flags.temperature, top_p=flags.top_p, top_k=flags.top_k, min_p=flags.min_p,
        max_new_tokens=flags.max_new_tokens,
    )  # fmt: skip
    replay = build_replay(model, MemoryConfig(), policy)
    experts = None if replay is None else replay.shape
    prompts = encode_prompts(policy, max(flags.prompts, MAX_BATCH))
    differences = []
    for name in _engines(flags):
        served = dataclasses.replace(
            config,
            engine=name,  # type: ignore[arg-type]
            max_running_requests=MAX_BATCH,
        )
        async with _engine(model, flags.url, served, experts) as client:
            samples = await _sample(client, prompts[: flags.prompts], params)
            spread = await batch_spread(client, prompts[:MAX_BATCH])
        compared = await asyncio.to_thread(
            compare_samples, name, policy, samples, flags.temperature, limit, experts
        )
        differences += [dataclasses.replace(each, batch_max=spread) for each in compared]
    return differences


async def batch_spread(client: EngineClient, prompts: Sequence[tuple[int, ...]]) -> float:
    """Return by how much the logprob of a token depends on how many requests run with its own, in nats.

    The first 1, 2, 4 … of ``prompts`` run at once, by greedy sampling; each one's logprobs are compared with
    those in its smallest batch. A batch of all comes before and fills the cache: a prefix that is computed
    may differ from one that is read.
    """
    from agentrl.documents.sampling import SamplingParams

    params = SamplingParams(temperature=0.0, max_new_tokens=_BATCH_TOKENS)
    sizes = [len(prompts), *(2**power for power in range(len(prompts).bit_length()))]
    smallest: dict[int, Generation] = {}
    spread = 0.0
    for number, size in enumerate(sizes):
        made: list[Generation] = await asyncio.gather(
            *(
                client.generate(ids, params, f"batch-{number}-{place:06d}-")
                for place, ids in enumerate(prompts[:size])
            )
        )
        if number == 0:
            continue
        for place, generation in enumerate(made):
            alone = smallest.setdefault(place, generation)
            for ours, theirs, *logprobs in zip(
                alone.output_ids, generation.output_ids, alone.logprobs, generation.logprobs, strict=False
            ):
                spread = max(spread, abs(logprobs[0] - logprobs[1]))
                if ours != theirs:
                    break  # what follows another token is another prompt's
    return spread


def encode_prompts(policy: Policy, count: int) -> list[tuple[int, ...]]:
    """Return ``count`` different prompts as token ids, rendered with the model's chat template."""
    prompts = []
    for number in range(count):
        repeats, place = divmod(number, len(_QUESTIONS))
        question = _QUESTIONS[place] + (f" Variant {repeats + 1}." if repeats else "")
        text = policy.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        prompts.append(tuple(policy.tokenizer.encode(str(text), add_special_tokens=False)))
    return prompts


def compare_samples(
    engine: str,
    policy: Policy,
    samples: Sequence[Sample],
    temperature: float,
    limit: float,
    experts: ExpertShape | None = None,
) -> list[ParityDifference]:
    """Return a Difference per executor; one forest of chains holds all samples.

    With ``experts``, whose routing the policy replays, there are two: without and with the samples' routing.
    """
    from agentrl.data.forest import ForestRouting, TokenForest, forest_from_sequences
    from agentrl.distributed.parallel_model import ParallelModel
    from agentrl.documents.model_call import SamplingMask, free_routing, unpack_routing
    from agentrl.model.attention import EXECUTORS
    from agentrl.model.logprobs import ForwardOptions

    forest = forest_from_sequences(
        [sample.prompt + sample.output for sample in samples],
        [[False] * len(sample.prompt) + [True] * len(sample.output) for sample in samples],
        temperature=temperature,
    )
    masks = [SamplingMask.unpack(sample.sampling_mask, len(sample.output)) for sample in samples]
    forest = dataclasses.replace(forest, sampling_mask=SamplingMask.join(masks))
    theirs = np.concatenate([np.asarray(sample.logprobs) for sample in samples])
    forests: dict[Literal["", "own", "replayed"], TokenForest] = {"": forest}
    if experts is not None and all(sample.routing for sample in samples):
        pieces = [sample.routing + free_routing(1) for sample in samples]
        routing = ForestRouting(unpack_routing(b"".join(pieces), experts))
        forests = {"own": forest, "replayed": dataclasses.replace(forest, routing=routing)}
    differences = []
    for executor in EXECUTORS:
        model = ParallelModel(policy.model, executor=executor, trains=False)
        for kind, each in forests.items():
            ((logprobs, _),) = model.logprobs([each], ForwardOptions())
            ours = logprobs.detach().cpu().numpy()
            differences.append(ParityDifference.of(engine, executor, ours, theirs, limit, kind))
    return differences


def _engines(flags: ParityFlags) -> list[str]:
    """Return the names in ``--engine``; ConfigError for an unknown one, and for several with ``--url``."""
    from agentrl.inference.engines.commands import ENGINES

    names = flags.engine.split(",")
    for name in names:
        if name not in ENGINES:
            raise ConfigError(
                f"unknown engine {name!r} in --engine", hint=f"give one or more of: {', '.join(ENGINES)}"
            )
    if flags.url and len(names) > 1:
        raise ConfigError(
            f"--url is one engine, and --engine names {len(names)}",
            hint="give the one engine that runs there",
        )
    return names


@asynccontextmanager
async def _engine(
    model: ModelConfig, url: str | None, config: EngineConfig, experts: ExpertShape | None
) -> AsyncIterator[EngineClient]:
    """Yield a client of the engine at ``--url``, or of one that is started for the block."""
    from agentrl.inference.engines.clients import engine_client

    if url:
        async with engine_client(config.engine, url, _GENERATE_SECONDS, experts=experts) as client:
            yield client
        return
    async with started_engine(model, config, experts) as client:
        yield client


@asynccontextmanager
async def started_engine(
    model: ModelConfig, config: EngineConfig, experts: ExpertShape | None = None
) -> AsyncIterator[EngineClient]:
    """Start the engine ``config.engine`` for the block, and yield its client. Call it in the main thread.

    Its log is kept, and named on stderr, if it ended by itself or an EngineError ends the block.
    """
    from agentrl.inference.engines.clients import engine_client
    from agentrl.inference.engines.commands import EngineProcess, engine_command, free_port

    port = free_port(config.host)
    command = engine_command(str(model.model_name_or_path), model, config, port)
    folder, is_kept = Path(tempfile.mkdtemp(prefix="agentrl-engine-")), False
    process = EngineProcess(command, folder / "engine.log")
    try:
        async with engine_client(
            config.engine, f"http://{config.host}:{port}", _GENERATE_SECONDS, experts=experts
        ) as client:
            await process.wait_ready(client, config.engine_start_seconds)
            yield client
    except EngineError:
        is_kept = True
        raise
    finally:
        is_kept = is_kept or process.returncode is not None
        await process.stop()
        if is_kept:
            print(f"the log of the engine is kept: {process.log_file}", file=sys.stderr, flush=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)


async def _sample(
    client: EngineClient, prompts: Sequence[tuple[int, ...]], params: SamplingParams
) -> list[Sample]:
    generations: list[Generation] = await asyncio.gather(
        *(
            client.generate(ids, params, f"parity-{place:06d}", routed_from=0)
            for place, ids in enumerate(prompts)
        )
    )
    samples = [
        Sample(prompt, made.output_ids, made.logprobs, made.sampling_mask, made.routing)
        for prompt, made in zip(prompts, generations, strict=True)
        if made.output_ids
    ]
    if not samples:
        raise EngineError(f"engine {client.url} generated no token for any of {len(prompts)} prompts")
    if {generation.logprobs_of for generation in generations} - {"policy", "truncated"}:
        raise EngineError(
            f"engine {client.url} returns no sampling masks, and its logprobs are of what top_p, top_k or"
            " min_p left: the trainer cannot compute these",
            hint="leave --top_p, --top_k and --min_p out, or compare --engine local or sglang",
        )
    return samples
