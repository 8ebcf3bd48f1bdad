"""Execute the loss of another system on the golden step, and print its value and gradient as JSON.

    python scripts/peers/losses.py SYSTEM FOLDER < STEP

``FOLDER`` has the system's source. ``STEP`` is JSON: {name: [trajectories, tokens]} of ``advantages``,
``logprobs`` (πθ), ``start`` (the trainer's at the start of the step), ``behavior`` (μ), ``reference``,
``age`` and ``mask``.
``compare.py`` runs this once a system, in a venv of its own.

A module that is not installed is a stand-in: these functions are arithmetic on tensors, and what they import
beside it (Ray, Megatron, vLLM) does nothing here.
"""

from __future__ import annotations

import collections
import importlib.abc
import importlib.machinery
import json
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import typing_extensions
from torch import Tensor

TOKEN_MEAN, TRAJECTORY_MEAN = "token-mean", "seq-mean-token-mean"


class _Anything(type):
    """The type of stand-ins: every attribute, subscript and call of one is another."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (StandIn,), {})

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __or__(cls, _: Any) -> Any:
        return cls

    __ror__ = __or__


class StandIn(metaclass=_Anything):
    """An object of a module that is not installed; as a decorator it changes nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn()

    def __call__(self, *given: Any, **_: Any) -> Any:
        return given[0] if given and callable(given[0]) else StandIn()


class _Module(types.ModuleType):
    __path__: typing.ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (StandIn,), {})


class MissingModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds, after all others, what the package ``own`` of the system imports and is not installed.

    Another package that tries an import must learn that it is missing.
    """

    def __init__(self, own: str) -> None:
        self._own = own

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        top = name.partition(".")[0]
        if top == self._own or not (self._asked_by_own() or isinstance(sys.modules.get(top), _Module)):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def _asked_by_own(self) -> bool:
        frame = sys._getframe(2)
        while frame is not None and "importlib" in frame.f_code.co_filename:
            if frame.f_globals["__name__"] == "importlib.util":
                return False  # it asks whether there is one
            frame = frame.f_back
        return frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == self._own

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


class Step:
    """The golden step as tensors, float32[trajectories, tokens]; ``mask`` is bool, ``age`` int64."""

    def __init__(self, given: dict[str, list[list[float]]]) -> None:
        values = {name: torch.tensor(rows) for name, rows in given.items()}
        self.mask, self.age = values["mask"].bool(), values["age"].long()
        self.advantages, self.start, self.behavior, self.reference = (
            values[name] for name in ("advantages", "start", "behavior", "reference")
        )
        self.logprobs = values["logprobs"].requires_grad_()

    @property
    def rows(self) -> range:
        return range(len(self.mask))

    def row(self, values: Tensor, row: int) -> Tensor:
        """The tokens of one trajectory, without padding."""
        return values[row][self.mask[row]]

    def packed(self, values: Tensor) -> Tensor:
        """The tokens of all trajectories, one after another."""
        return values[self.mask]


Losses = dict[str, Callable[[], Tensor]]
"""{recipe of AgentRL: the loss that the system computes}."""


def verl(step: Step) -> Losses:
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
    from verl.workers.config import ActorConfig
    from verl.workers.config.actor import PolicyLossConfig

    def loss(mode: str, old: Tensor, mean: str, weights: Tensor | None = None, **config: Any) -> Tensor:
        actor = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **config)
        # Its workers give the tokens and trajectories of the step, those that a rejection drops included.
        actor.global_batch_info.update(
            dp_size=1, batch_num_tokens=step.mask.sum(), global_batch_size=len(step.mask)
        )
        value, _ = core_algos.get_policy_loss_fn(mode)(
            old, step.logprobs, step.advantages, step.mask.float(), mean, actor, weights
        )
        return value

    def decoupled() -> Tensor:
        weights, mask, _ = compute_rollout_correction_and_rejection_mask(
            step.start, step.behavior, step.mask.float(), rollout_is="token", rollout_is_threshold=2.0
        )
        assert torch.equal(mask, step.mask.float())
        return loss("vanilla", step.start, TOKEN_MEAN, weights.batch["rollout_is_weights"])

    def bypass(rule: str, threshold: Any) -> Tensor:
        rejection = {"rollout_rs": rule, "rollout_rs_threshold": threshold, "loss_type": "ppo_clip"}
        policy_loss = PolicyLossConfig(rollout_correction=rejection)
        return loss("bypass_mode", step.behavior, TOKEN_MEAN, policy_loss=policy_loss)

    bounds = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}
    return {
        "verl": lambda: loss("vanilla", step.start, TOKEN_MEAN),
        "verl-decoupled": decoupled,
        "verl-bypass": lambda: bypass("token_k1", "0.5_2.0"),
        "verl-bypass-kl": lambda: bypass("seq_mean_k3", 0.1),
        "verl-gspo": lambda: loss("gspo", step.start, TRAJECTORY_MEAN, **bounds),
        "gspo": lambda: loss("gspo", step.behavior, TRAJECTORY_MEAN, **bounds),
        "dppo": lambda: loss("dppo_tv", step.behavior, TOKEN_MEAN, clip_ratio_c=1e9),
    }


def trl(step: Step) -> Losses:
    from trl.trainer.grpo_trainer import GRPOTrainer

    def loss(kind: str, old: Tensor, weights: Tensor | None = None, beta: float = 0.0, **own: Any) -> Tensor:
        mask = step.mask.long()
        metrics: Any = collections.defaultdict(lambda: collections.defaultdict(list))
        trainer = types.SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *_, **__: (step.logprobs, torch.zeros_like(old), None),
            _metrics=metrics, _entropy_bonus_enabled=False, aux_loss_enabled=False, top_entropy_quantile=1.0,
            off_policy_mask_threshold=None, importance_sampling_level="token", beta=beta, loss_type=kind,
            epsilon_low=0.2, epsilon_high=own.get("epsilon_high", 0.2), use_vllm=weights is not None,
            vllm_importance_sampling_correction=True, current_gradient_accumulation_steps=1,
            max_completion_length=own.get("length", 1), model=types.SimpleNamespace(training=True),
            args=types.SimpleNamespace(
                delta=None, use_bias_correction_kl=False, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05,
                vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0,
            ),
            accelerator=types.SimpleNamespace(
                num_processes=1, gather=lambda x: x, gather_for_metrics=lambda x: x,
                reduce=lambda x, reduction: x,
            ),
        )  # fmt: skip
        trainer.get_gamma_weights = GRPOTrainer.get_gamma_weights
        given = {
            "prompt_ids": mask[:, :0], "prompt_mask": mask[:, :0], "completion_ids": mask,
            "completion_mask": mask, "advantages": step.advantages, "old_per_token_logps": old,
            "ref_per_token_logps": step.reference, "importance_sampling_ratio": weights,
            "sampling_per_token_logps": step.behavior, "num_items_in_batch": mask.sum(),
        }  # fmt: skip
        return GRPOTrainer._compute_loss(trainer, None, given)

    # The trainer computes it while it generates: exp of the sum over the sequence; 3 is its default.
    ratio = torch.exp(((step.start - step.behavior) * step.mask).sum(-1, keepdim=True))
    return {
        "trl": lambda: loss("dapo", step.start, ratio.masked_fill(ratio > 3.0, 0.0)),
        "trl-truncate": lambda: loss("dapo", step.start, ratio.clamp(max=3.0)),
        "grpo": lambda: loss("grpo", step.behavior),
        "grpo-kl": lambda: loss("grpo", step.behavior, beta=0.04),
        "dapo": lambda: loss("dapo", step.behavior, epsilon_high=0.28),
        "dr-grpo": lambda: loss("dr_grpo", step.behavior, length=8192),
        "cispo": lambda: loss("cispo", step.behavior, epsilon_high=5.0),
        "sapo": lambda: loss("sapo", step.behavior),
        "vespo": lambda: loss("vespo", step.behavior),
    }


def areal(step: Step) -> Losses:
    from areal.api.cli_args import RejectionSamplingConfig
    from areal.trainer.ppo.actor import compute_prox_logp_approximations, grpo_loss_fn

    rejection = RejectionSamplingConfig(level="token", action="mask", metric="ratio", upper=5.0)

    def loss(proximal: Tensor) -> Tensor:
        given = {
            "logprobs": step.behavior, "advantages": step.advantages, "loss_mask": step.mask,
            "prox_logp": proximal,
        }  # fmt: skip
        return grpo_loss_fn(
            step.logprobs, torch.zeros_like(step.start), given, 0.2, None, None, rejection_sampling=rejection,
            use_decoupled_loss=True,
        )  # fmt: skip

    def interpolated() -> Tensor:
        # From the logprobs at the start of the step: without mini-batches they are πθ's, which it takes.
        version = int(step.age.max()) + 1
        found = compute_prox_logp_approximations(
            step.behavior, step.start, version - 1 - step.age, version, "loglinear"
        )
        return found["loglinear"]

    return {"areal": lambda: loss(step.start), "areal-a3po": lambda: loss(interpolated())}


def slime(step: Step) -> Losses:
    from slime.backends.megatron_utils.loss import vanilla_tis_function
    from slime.utils.ppo_utils import compute_policy_loss

    def loss() -> Tensor:
        losses, _ = compute_policy_loss(
            step.packed(step.start - step.logprobs), step.packed(step.advantages), 0.2, 0.28
        )
        losses, _, _ = vanilla_tis_function(
            types.SimpleNamespace(tis_clip_low=0.0, tis_clip=2.0),
            pg_loss=losses,
            train_log_probs=[step.row(step.start, row) for row in step.rows],
            rollout_log_probs=[step.row(step.behavior, row) for row in step.rows],
            loss_masks=[step.mask[row] for row in step.rows],
        )
        parts = losses.split([int(step.mask[row].sum()) for row in step.rows])
        return torch.stack([part.mean() for part in parts]).mean()

    return {"slime": loss}


def prime_rl(step: Step) -> Losses:
    from prime_rl.trainer.rl import loss as losses

    def total(function: Callable[..., Any], **config: float) -> Tensor:
        parts = [
            function(
                losses.LossInputs(
                    trainer_logprobs=step.row(step.logprobs, row), ref_logprobs=None,
                    inference_logprobs=step.row(step.behavior, row),
                    advantages=step.row(step.advantages, row),
                    loss_mask=step.row(step.mask, row),
                ),
                types.SimpleNamespace(adv_tau=1.0, **config),
            ).loss
            for row in step.rows
        ]  # fmt: skip
        return torch.stack(parts).sum() / step.mask.sum()

    bounds = {"dppo_mask_low": 0.2, "dppo_mask_high": 0.2}
    return {
        "prime-rl": lambda: total(losses.ipo_loss_fn, ipo_threshold=0.3, kl_tau=0.0),
        "prime-rl-dppo": lambda: total(losses.default_loss_fn, kl_tau=1e-3, **bounds),
    }


def skyrl(step: Step) -> Losses:
    typing.TypedDict = typing_extensions.TypedDict  # it is written for Python 3.12
    from skyrl.backends.skyrl_train.utils import ppo_utils

    def loss() -> Tensor:
        mask = step.mask.float()
        correction = types.SimpleNamespace(
            tis_ratio_type=None, sequence_mask_metric=None, outlier_token_is_threshold_low=None,
            outlier_token_is_threshold_high=None, token_mask_is_threshold_low=None,
            token_mask_is_threshold_high=None,
        )  # fmt: skip
        config = types.SimpleNamespace(
            policy_loss_type="regular", eps_clip_low=0.2, eps_clip_high=0.2, off_policy_correction=correction
        )
        # Its trainer divides the advantages of a step by what its `token_mean` is over, and sums.
        value, _ = ppo_utils.ppo_policy_loss(
            step.logprobs, step.start, step.advantages / mask.sum(), config, mask, step.behavior
        )
        kl = ppo_utils.compute_approx_kl(step.logprobs, step.reference, mask, kl_estimator_type="k3")
        return value + 0.001 * (kl * mask).sum() / mask.sum()

    return {"skyrl": loss}


def nemo_rl(step: Step) -> Losses:
    sys.modules["transformers"] = transformers = _Module("transformers")  # it refuses newer ones
    transformers.__version__ = "5.0.0"
    from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn

    def shifted(values: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(values[:, :1]), values], dim=1)  # position 0 predicts nothing

    def loss() -> Tensor:
        function = ClippedPGLossFn(ClippedPGLossConfig(use_importance_sampling_correction=True))
        given = {
            "token_mask": shifted(step.mask.float()), "sample_mask": torch.ones(len(step.mask)),
            "advantages": shifted(step.advantages), "prev_logprobs": shifted(step.start),
            "generation_logprobs": shifted(step.behavior),
            "reference_policy_logprobs": shifted(step.reference),
        }  # fmt: skip
        value, _ = function(step.logprobs, given, torch.tensor(len(step.mask)), step.mask.sum())
        return value

    return {"nemo-rl": loss}


SYSTEMS = {
    "verl": verl, "trl": trl, "areal": areal, "slime": slime, "prime_rl": prime_rl, "skyrl": skyrl,
    "nemo_rl": nemo_rl,
}  # fmt: skip


def main() -> None:
    system, folder = sys.argv[1], Path(sys.argv[2])
    torch.compile = lambda function=None, **_: function or (lambda inner: inner)
    sys.meta_path.append(MissingModules(system))
    sys.path[:0] = [
        str(path) for path in (folder, folder / "src", *folder.glob("packages/*/src")) if path.is_dir()
    ]
    step = Step(json.load(sys.stdin))
    found = {}
    for recipe, loss in SYSTEMS[system](step).items():
        value = loss()
        (gradient,) = torch.autograd.grad(value, step.logprobs)
        found[recipe] = {"loss": value.item(), "gradient": step.packed(gradient).tolist()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
