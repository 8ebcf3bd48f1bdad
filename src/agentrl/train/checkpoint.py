"""Write and read checkpoints: model, optimizer, critic, schedules, random states and the steps they contain.

A checkpoint is a folder that is written atomically, in the background, from copies in host memory. Its model
is what is published of the step, a Hugging Face folder that other tools load: both are written once, and
linked. The optimizer's state, with the weights that publication rounds, is torch.distributed.checkpoint's:
each rank writes its part, nothing is gathered.
"""

from __future__ import annotations

import contextlib
import json
import logging
import pickle
import random
import shutil
import struct
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agentrl.base.atomic_folder import begin_folder, discard_folder, finish_folder
from agentrl.documents.status import StepStatus
from agentrl.documents.training import (
    STATE,
    Checkpoint,
    CheckpointState,
    TrainStep,
    checkpoint_folders,
    read_checkpoint,
    readable_checkpoints,
    require_choice,
)
from agentrl.errors import ConfigError, ModelError, quoted
from agentrl.model.load import Policy
from agentrl.train.controller import Controller
from agentrl.train.critic import Critic
from agentrl.train.lease import ThreadFence
from agentrl.train.optimizer import keep_hyperparameters, load_optimizer
from agentrl.train.step import PolicyTrainer
from agentrl.weights.folder import (
    architecture,
    complete_folder,
    explain_write_errors,
    require_space,
)


def read_random_states() -> dict[str, Any]:
    """Return the states of this process; ``torch.load`` reads them with ``weights_only``."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        # Store a tensor: loading with ``weights_only`` refuses NumPy's arrays.
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random_states(states: dict[str, Any]) -> None:
    """Set the states that ``read`` returned; those of GPUs only where there are as many."""
    random.setstate(states["python"])
    kind, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


logger = logging.getLogger(__name__)

_TRAINER = "trainer.pt"
_OPTIMIZER, _CRITIC = "optimizer", "critic"
_MOMENTS = 2
_UNREADABLE = (
    OSError, KeyError, ValueError, RuntimeError, EOFError, struct.error, pickle.UnpicklingError,
)  # fmt: skip
"""What torch.load and load_state_dict raise for a file that is damaged or has other content."""


@dataclass(frozen=True)
class Unfinished:
    """A checkpoint whose content is copied, and is being written to a temporary folder."""

    target: Path
    temporary: Path
    state: CheckpointState
    policy: Policy
    needed: int
    """Bytes on the disk."""
    writes: Sequence[Future[Any]]
    link: Callable[[Path], None] | None
    """Links the weights of a version of this step into a folder; None: they are among ``writes``."""
    of_trainer: dict[str, Any]

    def finish(self, *, limit: int, fence: ThreadFence) -> Path:
        """Wait until it is written, rename it, and delete all but the newest ``limit`` checkpoints.

        Blocks. Raises PublishError, leaving nothing behind, if a write failed; LeaseLostError if another
        trainer has taken over.
        """
        root = self.target.parent
        try:
            with explain_write_errors(self.target, self.needed):
                if self.link is not None:
                    # Link first: the version is not published before.
                    self.link(self.temporary / "model")
                    complete_folder(self.policy.base, self.temporary / "model", self.policy.chat_template)
                for write in self.writes:
                    write.result()
                torch.save(self.of_trainer, self.temporary / _TRAINER)
                content = json.dumps(asdict(self.state), indent=1) + "\n"
                (self.temporary / STATE).write_text(content, encoding="utf-8")
                # Ask last: the writes may have outlived the lease, and a successor writes here then.
                fence.check()
                finish_folder(self.temporary, self.target)
        finally:
            # Wait: after an error, others may still write to the folder that is discarded.
            wait(self.writes)
            discard_folder(self.temporary)
        lineage = _lineage(root, self.state.train_steps, self.state.attempt)
        surplus = [item.folder for item in lineage[:-limit]]
        # Record it before deleting: a run that forks from one of them at this moment keeps it.
        discarded = fence.discard([folder.name for folder in surplus]) if surplus else []
        for folder in surplus:
            if folder.name in discarded:
                shutil.rmtree(folder, ignore_errors=True)
        return self.target


def begin(
    root: Path,
    state: CheckpointState,
    controller: Controller,
    *,
    link: Callable[[Path], None] | None = None,
) -> Unfinished:
    """Copy what ``root/checkpoint-000010`` will hold, and write it in the background.

    Checkpoints with reverted steps are neither counted nor deleted. With ``link``, ``finish`` links the model
    of a version of this step by it, and writes none. Raises PublishError, leaving nothing behind, if the disk
    is full.
    """
    policy, of_model = controller.policy, controller.writer.checkpoint_bytes
    target = root / state.folder_name
    width = max(item.element_size() for item in policy.model.parameters() if item.requires_grad)
    own = width if policy.adapter is not None else (policy.own_dtype or policy.model.dtype).itemsize
    needed = of_model + (_MOMENTS + bool(policy.rounded_weights())) * of_model * width // own
    if (critic := controller.trainer.critic) is not None:
        needed += (1 + _MOMENTS) * sum(item.nbytes for item in critic.trained_weights().values())
    with explain_write_errors(target, needed), contextlib.ExitStack() as on_error:
        require_space(target, needed)
        temporary = begin_folder(target)
        on_error.callback(discard_folder, temporary)
        (temporary / "model").mkdir()
        writes = controller.write_checkpoint(state.step, temporary, link is None)
        # Read them now: the next step changes them before ``finish`` writes them.
        scheduler = controller.trainer.scheduler.state_dict()
        of_trainer = {"scheduler": scheduler, "random": read_random_states()}
        if (critic := controller.trainer.critic) is not None:
            of_trainer[_CRITIC] = critic.scheduler.state_dict()
        on_error.pop_all()
    return Unfinished(target, temporary, state, policy, needed, writes, link, of_trainer)


def find(
    root: Path,
    choice: str | None,
    steps: Sequence[TrainStep],
    *,
    run_name: str,
    base: Path,
    discarded: Collection[str] = (),
) -> Checkpoint | None:
    """Return the checkpoint to resume from, or None.

    ``choice`` is ``auto`` (the newest complete one without reverted steps), ``none`` or a folder. ``steps``
    are all TrainSteps of the run. ``discarded`` names checkpoints that are being deleted. Raises ConfigError
    for a folder without a checkpoint, a checkpoint of another run, steps that are not in the database, and a
    named checkpoint with reverted steps; ModelError for another architecture than that of ``base``.
    """
    if choice in (None, "none"):
        return None
    if choice == "auto":
        newest = next(usable(root, steps, run_name=run_name, discarded=discarded), None)
        return newest and _checked(newest, base)
    require_choice(choice)
    folder = Path(str(choice))
    named = read_checkpoint(folder)
    reverted = _reverted(named, run_name, steps)
    if reverted:
        raise ConfigError(
            f"{folder} contains {len(reverted)} reverted steps, such as {reverted[0]}: the run went on from"
            " an earlier checkpoint, and other steps train their data now",
            hint=f"start another run from its weights: --model_name_or_path {quoted(named.model)}",
        )
    return _checked(named, base)


def usable(
    root: Path, steps: Sequence[TrainStep], *, run_name: str, discarded: Collection[str] = ()
) -> Iterator[Checkpoint]:
    """Yield the complete checkpoints without reverted steps, newest first. Raises as ``find``."""
    folders = reversed(checkpoint_folders(root))
    found = (read_checkpoint(folder) for folder in folders if folder.name not in discarded)
    return (item for item in found if not _reverted(item, run_name, steps))


def of_parent(folder: Path, base: Path) -> Checkpoint:
    """Return the checkpoint of another run from which this run begins. Raises as ``find``."""
    return _checked(read_checkpoint(folder), base)


def rename_reverted(
    root: Path, train_steps: Collection[str], attempt: int, needed: Collection[str] = ()
) -> list[Path]:
    """Rename checkpoints with reverted steps, those not in ``train_steps``, to ``undone-checkpoint-…``.

    Checkpoints of trainers after ``attempt`` stay, and those named in ``needed``, from which children began.
    Returns the new folders.
    """
    moved = []
    kept = {item.folder for item in _lineage(root, train_steps, attempt)}
    for folder in checkpoint_folders(root, attempt=attempt):
        if folder not in kept and folder.name not in needed:
            renamed = folder.with_name(f"undone-{folder.name}")
            # Make room: no folder can be renamed to one that holds files, such as one undone before.
            shutil.rmtree(renamed, ignore_errors=True)
            folder.rename(renamed)
            logger.warning("%s contains reverted steps: renamed to %s", folder, renamed.name)
            moved.append(renamed)
    return moved


def restore(checkpoint: Checkpoint, trainer: PolicyTrainer) -> None:
    """Load optimizer, rounded weights, critic, schedules and random states beside ``checkpoint.model``.

    Learning rate, betas, eps and weight decay are those of the flags, which may be new.
    """
    path = checkpoint.folder / _TRAINER
    try:
        with keep_hyperparameters(trainer.optimizer, trainer.scheduler):
            load_optimizer(checkpoint.folder / _OPTIMIZER, trainer.policy.model, trainer.optimizer)
            content = torch.load(path, map_location="cpu", weights_only=True)
            trainer.scheduler.load_state_dict(content["scheduler"])
        if trainer.critic is not None:
            _restore_critic(checkpoint, trainer.critic, content)
        restore_random_states(content["random"])
    except _UNREADABLE as error:
        raise ModelError(
            f"{checkpoint.folder} cannot be restored: {error}",
            hint="resume from another checkpoint, or start with 'none'",
        ) from error


def _restore_critic(checkpoint: Checkpoint, critic: Critic, content: dict[str, Any]) -> None:
    folder = checkpoint.folder / _CRITIC
    if _CRITIC not in content or not folder.is_dir():
        raise ModelError(
            f"{checkpoint.folder} holds no critic: its run was trained without one",
            hint=f"start another run from its weights: --model_name_or_path {quoted(checkpoint.model)}",
        )
    with keep_hyperparameters(critic.optimizer, critic.scheduler):
        load_optimizer(folder, critic.module, critic.optimizer)
        critic.scheduler.load_state_dict(content[_CRITIC])


def _lineage(root: Path, train_steps: Collection[str], attempt: int) -> list[Checkpoint]:
    """Return checkpoints of trainers up to ``attempt`` with no other steps, oldest first."""
    contained = set(train_steps)
    return [
        item for item in readable_checkpoints(root, attempt) if contained.issuperset(item.state.train_steps)
    ]


def _reverted(checkpoint: Checkpoint, run_name: str, steps: Sequence[TrainStep]) -> list[str]:
    """Return the reverted steps in a checkpoint; ConfigError for a checkpoint of another run."""
    folder, state = checkpoint.folder, checkpoint.state
    if state.run_name != run_name:
        raise ConfigError(
            f"{folder} is a checkpoint of run {state.run_name!r}, and this run is {run_name!r}",
            hint=f"give its model: --model_name_or_path {quoted(checkpoint.model)}; or another --output_dir",
        )
    status = {step.id: step.status for step in steps}
    unknown = [key for key in state.train_steps if key not in status]
    if unknown:
        raise ConfigError(
            f"{folder} contains {len(unknown)} steps that are not in database {run_name}:"
            " the database has been emptied, or is another one",
            hint="give --resume_from_checkpoint none, or another --output_dir, to start from the base model",
        )
    return [key for key in state.train_steps if status[key] is not StepStatus.COMMITTED]


def _checked(checkpoint: Checkpoint, base: Path) -> Checkpoint:
    folder, state = checkpoint.folder, checkpoint.state
    expected = architecture(base)
    differing = [key for key in expected if state.architecture.get(key, expected[key]) != expected[key]]
    if differing:
        listed = ", ".join(f"{key} {state.architecture[key]}, not {expected[key]}" for key in differing)
        raise ModelError(
            f"{folder} has another architecture than {base}: {listed}",
            hint="give the --model_name_or_path that the run started with, or --resume_from_checkpoint none",
        )
    return checkpoint
