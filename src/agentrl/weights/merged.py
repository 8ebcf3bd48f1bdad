"""Merge an adapter into its base model in a process of its own, for engines that load whole weights only."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from pathlib import Path

from agentrl.errors import ModelError
from agentrl.weights.folder import checksums, read_adapter_config

MERGED = Path(".agentrl/merged")
_SECONDS = 1800.0
_STOP_SECONDS = 10.0
_LINES = 5


async def merged_model(adapter: Path, base: str | None, root: Path = MERGED) -> Path:
    """Return a folder with the whole model; merge unless the same adapter was merged into the same model.

    ``base`` is the model that the run starts from; None takes the folder that the adapter names. Raises
    ModelError if there is no such folder, and if the adapter cannot be merged within half an hour.
    """
    model = await asyncio.to_thread(_base_of, adapter, base)
    files = await asyncio.to_thread(checksums, adapter)
    key = json.dumps([[file.name, file.sha256] for file in files] + [[str(model)]])
    target = root / hashlib.sha256(key.encode()).hexdigest()[:16]
    if not target.is_dir():
        await _merge(adapter, model, target)
    return target


def _base_of(adapter: Path, base: str | None) -> Path:
    named = base or read_adapter_config(adapter).get("base_model_name_or_path")
    folder = Path(str(named))
    if named is None or not folder.is_dir():
        raise ModelError(
            f"{adapter} holds an adapter of {named or 'an unknown model'}, which is not a folder here",
            hint="give the model that the run starts from by --model_name_or_path",
        )
    return folder.resolve()


async def _merge(adapter: Path, base: Path, target: Path) -> None:
    command = [sys.executable, "-m", "agentrl.model.merge_adapter", str(adapter), str(base), str(target)]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(_SECONDS):
            _, words = await process.communicate()
    except TimeoutError as error:
        raise ModelError(f"{adapter} could not be merged within {_SECONDS:g} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            async with asyncio.timeout(_STOP_SECONDS):
                await process.wait()
    if process.returncode != 0:
        last = "\n".join(words.decode(errors="replace").strip().splitlines()[-_LINES:])
        raise ModelError(
            f"{adapter} cannot be merged into {base}:\n{last}",
            hint="give the model that it was trained with by --model_name_or_path",
        )
