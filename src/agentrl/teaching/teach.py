"""``agentrl teach``: open a teacher, compare its tokenizer with the student's, and fill its column."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from pathlib import Path

from agentrl.chat.model_folder import read_chat_files
from agentrl.chat.open_format import open_chat_format
from agentrl.config.load import Configs
from agentrl.config.schema import ClaimConfig, ModelConfig, RunConfig, TeacherConfig
from agentrl.errors import ConfigError, EngineError, RunMissingError
from agentrl.processes import stop_on_signals
from agentrl.store.client import Store, open_existing
from agentrl.store.mechanics.retry import retry_outages
from agentrl.teaching.engines import FolderTeacher, HttpTeacher, TeacherEngine
from agentrl.teaching.fill import Filler
from agentrl.teaching.readings import Teaching

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 2.0
_BEGIN_SECONDS = 60.0


async def teach(configs: Configs, *, until_empty: bool) -> int:
    """Fill until a signal, or with ``until_empty`` until nothing waits; return how many were filled."""
    run, flags = configs[RunConfig], configs[TeacherConfig]
    stop = stop_on_signals()
    if configs[ModelConfig].model_name_or_path is None:
        raise ConfigError("--model_name_or_path is missing", hint="give the folder of the student's model")
    engine = await asyncio.to_thread(_open, flags)
    try:
        with retry_outages(run.db_wait_seconds, stop):
            async with await _open_begun(run, stop) as store:
                teaching = await _teaching(engine, configs[ModelConfig], flags)
                filler = Filler(
                    store=store, teaching=teaching, claims=configs[ClaimConfig], name=flags.teacher_name,
                    concurrency=flags.teacher_concurrency,
                )  # fmt: skip
                await filler.run(stop, until_empty=until_empty)
                return filler.filled
    finally:
        await engine.close()


async def _open_begun(run: RunConfig, stop: asyncio.Event) -> Store:
    """Open the run; wait for a sampler or trainer that starts at the same time and begins it."""
    deadline = time.monotonic() + _BEGIN_SECONDS
    while True:
        try:
            return await open_existing(run)
        except RunMissingError as error:
            if time.monotonic() >= deadline or stop.is_set():
                raise
            logger.warning("waiting %g s for the run to begin: %s", _BEGIN_SECONDS, error.message)
            await asyncio.sleep(_RETRY_SECONDS)


def _open(flags: TeacherConfig) -> TeacherEngine:
    if flags.teacher is None:
        raise ConfigError("--teacher is missing", hint="give a model folder, or the URL of a server")
    if "://" in flags.teacher and not flags.teacher.startswith(("http://", "https://")):
        raise ConfigError(
            f"--teacher is {flags.teacher}", hint="a server's URL begins with http:// or https://"
        )
    if "://" in flags.teacher:
        return HttpTeacher(flags.teacher, flags.teacher_timeout_seconds)
    return FolderTeacher(Path(flags.teacher))


async def _teaching(engine: TeacherEngine, model: ModelConfig, flags: TeacherConfig) -> Teaching:
    """Return how the teacher reads: the student's ids if both tokenizers have the same vocabulary."""
    served = await _reached(engine, flags.teacher_wait_seconds)
    folder = Path(flags.teacher_tokenizer or served or "none")
    teaching = await asyncio.to_thread(_compare, engine, model, folder, flags)
    reads = "the student's ids" if teaching.tokenizers is None else "text, aligned"
    logger.info("teacher", extra={"by": engine.name, "reads": reads})
    return teaching


def _compare(engine: TeacherEngine, model: ModelConfig, folder: Path, flags: TeacherConfig) -> Teaching:
    if flags.teacher_tokenizer is not None and not folder.is_dir():
        raise ConfigError(f"--teacher_tokenizer {folder} is not a folder", hint="one with a tokenizer.json")
    if not folder.is_dir():
        raise ConfigError(
            f"teacher {engine.name} serves {folder}, which is not a folder here: its tokenizer cannot be"
            " compared with the student's",
            hint="give --teacher_tokenizer, a folder with its tokenizer.json",
        )
    student, own = read_chat_files(str(model.model_name_or_path)), read_chat_files(folder)
    is_same = student.tokenizer.get_vocab() == own.tokenizer.get_vocab()
    prompt = None if flags.teacher_prompt is None else _read(Path(flags.teacher_prompt))
    if is_same and prompt is None:
        return Teaching(engine, top_logprobs=flags.teacher_top_logprobs)
    described = replace(model, model_name_or_path=str(folder)) if is_same else ModelConfig()
    return Teaching(
        engine,
        teacher=open_chat_format(folder, described),
        tokenizers=None if is_same else (student.tokenizer, own.tokenizer),
        stop_ids=student.stop_ids,
        prompt=prompt,
        top_logprobs=flags.teacher_top_logprobs,
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--teacher_prompt {path} cannot be read: {error}", hint="give a text file"
        ) from error


async def _reached(engine: TeacherEngine, wait_seconds: float) -> str | None:
    """Return the folder of the teacher's model; wait for a server that is not up yet."""
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            return await engine.folder()
        except EngineError as error:
            if error.outage is None or time.monotonic() >= deadline:
                error.hint = (
                    "start the server, or correct --teacher; --teacher_wait_seconds is how long it is awaited"
                )
                raise
            logger.warning("the teacher is not up yet: %s", error.message)
            await asyncio.sleep(_RETRY_SECONDS)
