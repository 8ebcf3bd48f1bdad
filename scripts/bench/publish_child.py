"""Run one measurement of ``publish.py`` in a process of its own, and print it as a line of JSON.

python scripts/bench/publish_child.py '{"way": "delta", "model": "135M", "steps": 3, "uri": …, "folder": …}'
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from train_workload import SMOLLM

from agentrl.config.load import Configs, parse
from agentrl.config.schema import ModelConfig, RunConfig, TrainConfig
from agentrl.distributed.mesh import single_process
from agentrl.documents.document import now
from agentrl.documents.run import PolicyVersion
from agentrl.documents.status import ServiceStatus
from agentrl.model.flops import Precision
from agentrl.store.client import Store, open_store
from agentrl.train.build import build_trainer
from agentrl.train.controller import Controller, lead
from agentrl.train.folders import run_folders
from agentrl.train.lease import HeldTrainerLease, hold_lease
from agentrl.train.publishing import DeviceTurns, Progress, Publisher
from agentrl.weights.folder import checksums, complete_folder
from agentrl.weights.publish import publish_base

CHANGED = 0.013
"""Share of the weights that a step changes."""
FLAGS = {
    "baseline": (),
    "full": ("--publish", "full"),
    "delta": ("--publish", "delta"),
    "tensor": ("--weight_sync", "tensor"),
    "distributed": ("--weight_sync", "distributed"),
    "adapter": ("--lora_rank", "16"),
}
_SERVED_SECONDS = 300.0
_POLL_SECONDS = 0.01
AGENTRL = (sys.executable, "-m", "agentrl")


def make_model(name: str, folder: Path) -> Path:
    """Write SmolLM2-135M, or random weights of a ``tiny`` or ``1B`` model, in bfloat16 with a tokenizer."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    if name == "135M":
        source = SMOLLM
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    else:
        import demo_path  # noqa: F401
        from demo.tiny import build_tiny_model

        source = build_tiny_model(folder / "tiny", 0)
        shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 49152}
        if name == "tiny":
            shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
        heads = shape["hidden_size"] // 64
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(
            LlamaConfig(
                **shape, num_attention_heads=heads, num_key_value_heads=max(1, heads // 4),
                max_position_embeddings=8192, tie_word_embeddings=True,
            )
        )  # fmt: skip
        torch.set_default_dtype(torch.float32)
    target = folder / "model"
    model.save_pretrained(target)
    complete_folder(source, target)
    return target


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that this process holds, which is the only one."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def change(parameters: Iterator[torch.nn.Parameter], seed: int) -> None:
    """Move a share of the trained weights by about one step of bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters:
            flat = local(parameter).view(-1)
            count = max(1, int(CHANGED * flat.numel()))
            at = torch.randint(flat.numel(), (count,), generator=generator)
            flat[at] = flat[at] * (1 + 2**-7) + 1e-8  # the matrix B of a new adapter is zero


@contextmanager
def serving(configs: Configs, folder: Path, flags: tuple[str, ...]) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``agentrl serve`` with the local engine."""
    run, model = configs[RunConfig], configs[ModelConfig]
    argv = [
        *(*AGENTRL, "serve", "--engine", "local", "--run_name", run.run_name),
        *("--db_connection_string", run.db_connection_string, "--log_dir", str(folder)),
        *("--model_name_or_path", str(model.model_name_or_path), "--max_total_tokens", "4096", *flags),
    ]
    with (folder / "serve.log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


async def until_served(store: Store, above: int, process: subprocess.Popen[bytes]) -> int:
    """Wait until the engine serves a version above ``above``, and return it."""
    deadline = time.perf_counter() + _SERVED_SECONDS
    while True:
        for service in await store.services.live(60.0):
            version = service.policy_version
            if service.status is ServiceStatus.READY and version is not None and version > above:
                return version
        if process.poll() is not None or time.perf_counter() > deadline:
            raise RuntimeError(f"no version above {above} is served; its log says why")
        await asyncio.sleep(_POLL_SECONDS)


async def publish_now(store: Store, controller: Controller, progress: Progress, root: Path) -> None:
    """Publish whole weights while the caller waits: write them, hash the files, then the document."""
    policy, folder = controller.policy, root / "weights" / f"v{progress.step:06d}"
    weights = {name: local(item).to(torch.bfloat16) for name, item in policy.model.named_parameters()}
    policy.model.save_pretrained(folder, state_dict=weights)
    complete_folder(policy.base, folder, policy.chat_template)
    version = PolicyVersion(
        id=progress.version + 1, step=progress.step, location=str(folder), files=checksums(folder),
        train_step=None, published_at=now(),
    )  # fmt: skip
    await store.policy_versions.publish(version, attempt=progress.attempt)
    progress.version, progress.published_step = version.id, progress.step


@asynccontextmanager
async def begun(configs: Configs) -> AsyncIterator[tuple[Store, HeldTrainerLease]]:
    """Open a new run's database and hold its trainer's lease; drop it at the end."""
    async with await open_store(configs[RunConfig]) as store:
        async with hold_lease(store, 600.0) as lease:
            await publish_base(store, Path(str(configs[ModelConfig].model_name_or_path)), lease.attempt)
            yield store, lease
        await store.database.client.drop_database(store.run_name)


async def publish_steps(wanted: dict[str, Any]) -> dict[str, Any]:
    """Publish the weights of some steps; return the bytes of a version and the seconds of each step."""
    folder, way = Path(wanted["folder"]), wanted["way"]
    model = make_model(wanted["model"], folder)
    words = [
        *("--run_name", f"bench-{uuid.uuid4().hex[:8]}", "--db_connection_string", wanted["uri"]),
        *("--model_name_or_path", str(model), "--output_dir", str(folder / "out"), *FLAGS[way]),
        *("--save_steps", "1000000"),  # versions alone are measured
    ]
    configs = parse(words, command="agentrl train", description="", shown=())
    small = wanted["model"] != "1B"
    precision = Precision(torch.float32 if small else torch.bfloat16, torch.bfloat16)
    build = partial(build_trainer, configs, weights=None, total_steps=None, precision=precision)
    found: dict[str, Any] = {"waits": [], "published": [], "served": []}
    async with begun(configs) as (store, lease):
        with serving(configs, folder, FLAGS[way][:2] if "--weight_sync" in FLAGS[way] else ()) as process:
            controller = lead(single_process(), build)
            progress = Progress(attempt=lease.attempt)
            folders = await run_folders(store, configs[RunConfig], None, str(folder / "weights"))
            await folders.claim()
            publisher = Publisher(
                store=store, config=configs[TrainConfig], controller=controller, progress=progress,
                lease=lease, turns=DeviceTurns(lease=None, controller=controller), folders=folders,
                max_staleness=4, stop=asyncio.Event(),
            )  # fmt: skip
            served = await until_served(store, -1, process)
            for step in range(1, wanted["steps"] + 2):
                change((p for p in controller.policy.model.parameters() if p.requires_grad), step)
                progress.step, began, begun_at = step, time.perf_counter(), now()
                if way == "baseline":
                    await publish_now(store, controller, progress, folder)
                else:
                    async with publisher.turns.turn():
                        await publisher.offer()
                    await publisher.wait_for_bound()
                waited = time.perf_counter() - began
                served = await until_served(store, served, process)
                until = time.perf_counter() - began
                if step > 1:  # the first one also loads libraries
                    newest = await store.policy_versions.latest()
                    assert newest is not None
                    assert newest.published_at is not None
                    found["waits"].append(waited)
                    found["published"].append((newest.published_at - begun_at).total_seconds())
                    found["served"].append(until)
                # A step of training takes longer than this, and the engine's host ends its work meanwhile.
                await asyncio.sleep(wanted["between"])
            # A version in the trainer's memory has no files; engines get all of its tensors.
            found["bytes"] = newest.bytes or 2 * controller.policy.model.num_parameters()
            await publisher.close()
        controller.end()
    return found


def train_on_texts(wanted: dict[str, Any]) -> dict[str, Any]:
    """Train float32 weights on texts at 1e-6; return the bytes of each step's delta in bfloat16."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from agentrl.base.installation import shipped_files
    from agentrl.weights.delta import encode

    folder = Path(wanted["folder"])
    source = make_model(wanted["model"], folder)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    lines = (shipped_files() / "tasks" / "calculator_train.jsonl").read_text().splitlines()
    tokenizer = AutoTokenizer.from_pretrained(source)
    texts = [tokenizer(line, return_tensors="pt").input_ids % model.config.vocab_size for line in lines]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)

    def published() -> dict[str, torch.Tensor]:
        return {name: p.detach().to(torch.bfloat16) for name, p in model.named_parameters()}

    before = published()
    found: dict[str, Any] = {
        "sizes": [],
        "changed": [],
        "whole": sum(item.nbytes for item in before.values()),
    }
    for step in range(wanted["text_steps"]):
        for text in texts[2 * step % len(texts) :][:2]:
            model(input_ids=text, labels=text).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        current = published()
        delta = encode(before, current, folder / f"{step}.delta")
        found["sizes"].append(delta.file.bytes)
        found["changed"].append(delta.changed / delta.elements)
        before = current
    return found


def main() -> int:
    """Run the measurement that the JSON argument describes."""
    wanted = json.loads(sys.argv[1])
    result = train_on_texts(wanted) if wanted["way"] == "bytes" else asyncio.run(publish_steps(wanted))
    print(json.dumps(result), flush=True)
    shutil.rmtree(wanted["folder"], ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
