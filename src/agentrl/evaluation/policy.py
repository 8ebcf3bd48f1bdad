"""Find the policy to evaluate: a version of the run, a checkpoint, or a model folder."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.chat.model_folder import tokenizer_fingerprint
from agentrl.documents.document import plain
from agentrl.documents.run import OUTSIDE_VERSION, PolicyVersion
from agentrl.documents.status import VersionStatus
from agentrl.documents.training import is_checkpoint
from agentrl.errors import ModelError, PublishError
from agentrl.store.evaluations import digest
from agentrl.weights.folder import checksums, is_adapter, merged_model
from agentrl.weights.local_copy import LocalCopy, chain_to, is_in_place
from agentrl.weights.storage import is_remote

if TYPE_CHECKING:
    from agentrl.store.client import Store


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
