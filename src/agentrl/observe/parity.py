"""Compares the trainer's logprobs with an engine's, for the same ids and weights.

    python -m agentrl.observe.parity --model_name_or_path DIR --engine local
    python -m agentrl.observe.parity --model_name_or_path DIR --engine local,sglang --prompts 32
    python -m agentrl.observe.parity --model_name_or_path DIR --url http://127.0.0.1:30000

The engine samples; the trainer scores what it sampled, by its own forest and logprob code, with every
executor. The exit code is 1 when the mean of |Δlogprob| reaches the limit anywhere.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.console import RenderableType

from agentrl import cli
from agentrl.config.load import CommandParser
from agentrl.config.schema import EngineConfig, ModelConfig
from agentrl.errors import ConfigError, EngineError
from agentrl.observe.logging import quiet_transformers
from agentrl.observe.tables import stdout_console, table

if TYPE_CHECKING:
    from agentrl.inference.engine import Generation
    from agentrl.train.model import Policy

MEAN_LIMIT = 1e-3
ENGINES = ("local", "sglang")
_GENERATE_SECONDS = 600.0
_QUESTIONS = (
    "What is 17 times 23?",
    "Name three rivers of Europe and the seas that they reach.",
    "Write a short letter that asks a neighbour to water the plants for two weeks in July.",
    "Explain why the sky is blue.",
    "Sort these words: pear, apple, fig, cherry.",
    "def add(a, b):\n    return a + b\n\nWhat does this function do?",
    "Übersetze „good morning“ ins Deutsche, Französische und Japanische.",
    "Tell a story that begins with a locked door.",
)


@dataclass(frozen=True)
class Sample:
    """A prompt's ids, what the engine generated, and the logprobs that it gave for it."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Difference:
    """|Δlogprob| over all generated tokens, in nats, of one engine and one executor."""

    engine: str
    executor: str
    tokens: int
    mean: float
    p99: float
    max: float

    @classmethod
    def of(cls, engine: str, executor: str, ours: NDArray[Any], theirs: NDArray[Any]) -> Difference:
        """Compare two float[T] of the same tokens."""
        delta = np.abs(np.asarray(ours, np.float64) - np.asarray(theirs, np.float64))
        p99 = float(np.quantile(delta, 0.99))
        return cls(engine, executor, len(delta), float(delta.mean()), p99, float(delta.max()))

    @property
    def within(self) -> bool:
        """Whether the mean is below the limit; a NaN is not."""
        return self.mean < MEAN_LIMIT


def main(argv: list[str]) -> int:
    """Print the table; 1 when a mean reaches ``MEAN_LIMIT``."""
    flags = _parser().parse_args(argv)
    if flags.prompts < 1 or flags.max_new_tokens < 1:
        raise ConfigError("--prompts and --max_new_tokens must be above 0", cure="give them positive values")
    model = ModelConfig(
        model_name_or_path=flags.model_name_or_path, dtype=flags.dtype, chat_template=flags.chat_template
    )
    differences = asyncio.run(_compare(model, flags))
    stdout_console().print(render(differences, flags.model_name_or_path))
    return 0 if all(difference.within for difference in differences) else 1


def render(differences: Sequence[Difference], model: str) -> RenderableType:
    """The differences as a table."""
    rows = [
        [
            item.engine, item.executor, item.tokens, f"{item.mean:.2e}", f"{item.p99:.2e}", f"{item.max:.2e}",
            "within" if item.within else "above",
        ]
        for item in differences
    ]  # fmt: skip
    columns = ["engine", "executor", "tokens", "mean", "p99", "max", f"mean < {MEAN_LIMIT:g}"]
    return table(f"|Δlogprob| between trainer and engine, {model}", columns, rows, text=2)


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="python -m agentrl.observe.parity", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--model_name_or_path", required=True, help="folder of a Hugging Face model")
    parser.add_argument("--engine", default="local", help="engines to start: local, sglang or local,sglang")
    parser.add_argument("--url", help="an engine that serves the same weights already")
    parser.add_argument("--prompts", type=int, default=16, help="how many prompts")
    parser.add_argument("--max_new_tokens", type=int, default=64, help="tokens generated per prompt")
    parser.add_argument("--temperature", type=float, default=1.0, help="of sampling and of the logprobs")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--chat_template", help="file of a chat template that replaces the model's own")
    parser.add_argument("--engine_start_seconds", type=float, default=300.0, help="how long a start may take")
    return parser


async def _compare(model: ModelConfig, flags: Any) -> list[Difference]:
    from agentrl.train.model import load_policy

    quiet_transformers()
    policy = load_policy(model)
    policy.model.requires_grad_(False)
    prompts = encode_prompts(policy, flags.prompts)
    differences = []
    for name in [flags.url] if flags.url else flags.engine.split(","):
        async with _engine(name, model, flags) as url:
            samples = await _sample(url, prompts, flags.max_new_tokens, flags.temperature)
        differences += await asyncio.to_thread(compare_samples, name, policy, samples, flags.temperature)
    return differences


def encode_prompts(policy: Policy, count: int) -> list[tuple[int, ...]]:
    """``count`` different prompts as token ids, rendered by the model's chat template."""
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
    engine: str, policy: Policy, samples: Sequence[Sample], temperature: float
) -> list[Difference]:
    """One Difference per executor: the trainer scores every sample in one forest of chains."""
    from agentrl.batching.forest import forest_from_sequences
    from agentrl.train.attention import EXECUTORS
    from agentrl.train.step import ForwardOptions, forest_logprobs

    forest = forest_from_sequences(
        [sample.prompt + sample.output for sample in samples],
        [[False] * len(sample.prompt) + [True] * len(sample.output) for sample in samples],
    )
    theirs = np.concatenate([np.asarray(sample.logprobs) for sample in samples])
    differences = []
    for executor in EXECUTORS:
        options = ForwardOptions(executor=executor, temperature=temperature)
        logprobs, _ = forest_logprobs(policy.model, forest, options)
        differences.append(Difference.of(engine, executor, logprobs.detach().cpu().numpy(), theirs))
    return differences


@asynccontextmanager
async def _engine(name: str, model: ModelConfig, flags: Any) -> AsyncIterator[str]:
    """The url of ``name``: itself where it is one, else that of a server which runs meanwhile."""
    if flags.url:
        yield name
        return
    from agentrl.inference.engine import EngineClient
    from agentrl.inference.engines.process import EngineProcess, free_port

    config = EngineConfig(engine_start_seconds=flags.engine_start_seconds)
    port = free_port(config.host)
    url = f"http://{config.host}:{port}"
    with tempfile.TemporaryDirectory(prefix="agentrl-parity-") as folder:
        process = EngineProcess(_command(name, model, config, port), Path(folder) / "engine.log")
        try:
            async with EngineClient(url) as client:
                await process.wait_ready(client, flags.engine_start_seconds)
            yield url
        finally:
            await process.stop()


def _command(name: str, model: ModelConfig, config: EngineConfig, port: int) -> Any:
    from agentrl.inference.engines.local_command import local_command
    from agentrl.inference.engines.sglang import sglang_command

    folder = str(Path(str(model.model_name_or_path)).absolute())
    if name == "local":
        return local_command(
            folder, config, port=port, model_name=model.model_name, version=0, dtype=model.dtype
        )
    if name == "sglang":
        return sglang_command(folder, config, port=port, model_name=model.model_name, version=0)
    raise ConfigError(f"--engine names {name!r}", cure=f"give one or more of: {', '.join(ENGINES)}")


async def _sample(
    url: str, prompts: Sequence[tuple[int, ...]], max_new_tokens: int, temperature: float
) -> list[Sample]:
    from agentrl.inference.engine import EngineClient
    from agentrl.inference.sampling import SamplingParams

    params = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens)
    async with EngineClient(url, timeout=_GENERATE_SECONDS) as client:
        generations: list[Generation] = await asyncio.gather(
            *(client.generate(ids, params, f"parity-{place:06d}") for place, ids in enumerate(prompts))
        )
    samples = [
        Sample(prompt, generation.output_ids, generation.logprobs)
        for prompt, generation in zip(prompts, generations, strict=True)
        if generation.output_ids
    ]
    if not samples:
        raise EngineError(f"engine {url} generated no token for any of {len(prompts)} prompts")
    return samples


if __name__ == "__main__":
    sys.exit(cli.run(lambda: main(sys.argv[1:]), "python -m agentrl.observe.parity"))
