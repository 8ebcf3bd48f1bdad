"""Every metric of a training step: what it is, its unit, and what a healthy run shows.

    python -m agentrl.observe.metric_definitions > docs/metrics.md

The names are the same in MongoDB (``TrainStep.metrics``), in ``agentrl audit curve`` and in every tracker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class MetricDefinition:
    """One metric. ``keyed`` metrics map a text key to a number; a tracker gets each as ``name/key``."""

    name: str
    formula: str
    unit: str
    healthy: str
    keyed: bool = False


_ = MetricDefinition

SECTIONS: Final[dict[str, tuple[MetricDefinition, ...]]] = {
    "Reward": (
        _("reward", "mean score of every scored trajectory in the step's window of groups, trained or not", "score", "rises, with noise"),
        _("pass_rate", "share of those trajectories that pass", "0–1", "rises; near 0 or 1 little is learned"),
        _("source_pass_rate", "`pass_rate` of each source of a [mixture](tasks.md#mixtures)", "0–1", "as `pass_rate`; it opens gates"),
        _("abandoned_fraction", "share of those trajectories that became no training data", "0–1", "below 0.5"),
        _("abandoned_groups", "share of the window's groups without training data, since their scores agree", "0–1", "below 0.5; above it, the tasks are too easy or too hard"),
        _("length_bias", "mean generated tokens of trained trajectories ÷ that of all scored ones in the window", "ratio", "near 1; below 0.8, long trajectories are lost"),
        _("masked_calls", "model calls of the window that a sampling parameter excludes from training", "calls", "0, unless you mean it"),
    ),
    "Loss and policy": (
        _("loss", "the loss of --loss_calculater over the trainable tokens; of several updates, the mean by tokens", "–", "small, around 0; its level says little"),
        _("grad_norm", "2-norm of the gradient before it is clipped to --max_grad_norm", "–", "steady; a jump of 10 × comes before a collapse"),
        _("lr", "learning rate of the update", "–", "as scheduled"),
        _("ratio_mean", "mean of πθ/μ over trainable tokens", "ratio", "0.95–1.05"),
        _("ratio_max", "largest πθ/μ of a token", "ratio", "below 10; higher means stale or mismatched logprobs"),
        _("clip_ratio_max", "largest ratio that the loss clips: πθ/π_old, for GSPO the trajectory's", "ratio", "1 in a step of one update with --old_logprobs recompute; grows with the updates"),
        _("clipped_fraction", "share of trainable tokens that the loss's own clip bounds", "0–1", "0–0.2"),
        _("masked_fraction", "share that bounds on staleness and corrections drop, or that is extreme", "0–1", "below 0.1"),
        _("capped_fraction", "share whose weight `tis` or `seq_tis` lowers", "0–1", "below 0.1"),
        _("extreme_tokens", "tokens with πθ/μ beyond e^±20, which are dropped: their stored logprobs are wrong", "tokens", "0; else compare engine and trainer (`agentrl parity`)"),
        _("kl_k1", "mean of log μ/πθ: estimates KL(μ‖πθ)", "nats a token", "around 0, may be negative"),
        _("kl_k3", "mean of πθ/μ − 1 − log πθ/μ: estimates KL(μ‖πθ), never below 0", "nats a token", "below 0.01; above 0.1, sampler and trainer disagree (`agentrl parity`)"),
        _("kl_reference", "k3 estimate of KL(πθ‖π_ref), with a reference model", "nats a token", "grows slowly"),
        _("taught_fraction", "with a teacher: share of trainable tokens that it has a logprob of", "0–1", "near 1; lower where tokenizers differ"),
        _("kl_teacher", "k1 estimate of KL(πθ‖π_teacher) from these tokens", "nats a token", "falls"),
        _("kl_mismatch", "with --old_logprobs version: k3 estimate of KL(μ‖π_old), engine and trainer at the same version", "nats a token", "as at age 0 without it: below 1e-6 in float32, about 1e-4 in bfloat16"),
        _("kl_staleness", "with --old_logprobs version: k3 estimate of KL(π_old‖πθ), the trainer at the token's version and now", "nats a token", "0 at age 0; grows with age"),
        _("version_gap", "with --old_logprobs version: mean absolute difference of the stored and the trainer's own logprob of tokens of age 0", "nats", "below 1e-5 in float32; else agentrl teach --self computes otherwise than the trainer"),
        _("router_replayed", "of a mixture: share of rank 0's tokens with the experts that the engine chose (--router_replay)", "0–1", "near 1; the rest routes freely: last tokens, engines without routing"),
        _("router_differs", "share of those choices, by token and layer, that the trainer's router would make otherwise", "0–1", "below 0.1 at staleness 0; grows with staleness"),
        _("router_merge_differs", "share of merged prefix tokens whose trajectory had other experts than the one that is kept", "0–1", "near 0: one engine, one version; higher with several"),
        _("entropy", "mean entropy of πθ at trainable tokens, at their temperature and over the ids that top-p, top-k or min-p left", "nats a token", "falls slowly; near 0, exploration is over"),
        _("effective_sample_size", "(Σω)² / (n·Σω²) of ω = πθ/μ", "0–1", "above 0.9"),
        _("published_adapter_share", "share of what a LoRA adapter changes that rounding leaves in the last published version", "0–1", "above 0.9; below it, engines sample another policy than the one that is trained"),
        _("published_update_share", "without LoRA: share of what training has changed since the base model that rounding leaves in the last published version, from rows of each weight; above 1 where most changes are rounded up", "≥ 0", "1 for a float32 model; for bfloat16 it begins low at small learning rates and rises; watch kl_k3"),
        _("updates", "optimizer updates of the step", "updates", "as configured"),
    ),
    "Critic": (
        _("explained_variance", "with a critic: 1 − Var(R − V) / Var(R) of its values V and its targets R, as the step begins; missing where all targets are equal", "≤ 1", "rises from 0; below 0, a constant would explain more"),
        _("value_mean", "mean of V over the same tokens", "score", "near `reward`"),
        _("value_loss", "mean of ½·(V − R)², clipped by --value_clip, over the tokens of an update that have a target", "score²", "falls, and rises while the policy learns"),
        _("value_clipped_fraction", "share of these tokens whose value has moved by more than --value_clip in the step, and would move on", "0–1", "below 0.2; 0 in a step of one update"),
        _("critic_grad_norm", "2-norm of the critic's gradient before it is clipped to --max_grad_norm", "–", "steady"),
    ),
    "Staleness and queues": (
        _("staleness_mean", "mean age of the trainable tokens' policy version", "optimizer steps", "near --max_staleness"),
        _("staleness_max", "largest age of a trainable token", "optimizer steps", "that of the longest trajectory; at most --max_staleness with --staleness_policy mask or drop"),
        _("staleness_histogram", "tokens of each age", "tokens", "most at the lowest ages", keyed=True),
        _("version_fractions", "share of the trainable tokens of each policy version", "0–1", "most of the last versions", keyed=True),
        _("stale_trajectories", "trajectories so far that were too old to train", "trajectories", "few; else lower --target_concurrency"),
        _("quarantined_trajectories", "trajectories so far whose stored data are damaged", "trajectories", "0"),
        _("groups", "groups that the step trains", "groups", "--groups_per_step"),
        _("groups_open", "groups admitted and not yet trained: in sampling, in scoring, or ready", "groups", "near its limit, (--max_staleness + 1) × --groups_per_step; 0: samplers are idle"),
        _("groups_ready", "scored groups that wait for the next step", "groups", "near --groups_per_step; 0: sampling is the bottleneck; growing: training is"),
    ),
    "Size": (
        _("tokens", "tokens that the step computes, prompts included, shared prefixes once", "tokens", "steady"),
        _("trainable_tokens", "generated tokens that have a loss", "tokens", "steady; growth means longer answers"),
        _("trajectories", "trajectories that the step trains", "trajectories", "steady"),
        _("computed_fraction", "share of the trainable tokens that forward and backward compute: a trajectory whose advantages are all 0 is not, if the loss needs no more of it; it counts in the loss's denominators, `trainable_tokens` and `trajectories`, and every metric of ratios, KL, entropy, staleness or size is of the others", "0–1", "missing where all are computed, as they are unless groups without a signal are trained (--min_score_spread 0, --drop_zero_advantage false)"),
        _("unique_tokens", "the same as `tokens`", "tokens", "steady"),
        _("total_tokens", "tokens if each model call were a row: prompt and output", "tokens", "steady"),
        _("sharing_ratio", "total_tokens / unique_tokens", "ratio", "above 1 with several turns or a group's common prompt"),
        _("micro_batches", "forward passes of an update on a rank", "passes", "few"),
        _("padding_efficiency", "tokens ÷ positions that the executor ran", "0–1", "near 1"),
    ),
    "Speed": (
        _("tokens_per_second", "tokens ÷ seconds of forward, backward and optimizer, all ranks", "tokens/s", "steady"),
        _("total_tokens_per_second", "tokens_per_second × sharing_ratio", "tokens/s", "steady"),
        _("tflops_per_second", "model FLOPs of a rank ÷ those seconds ÷ 10¹²", "TFLOP/s", "steady"),
        _("mfu", "model FLOPs of a rank ÷ those seconds ÷ the device's peak; missing if the peak is unknown", "0–1", "0.3–0.5 on a GPU with a dense model"),
        _("prefix_cache_hit_rate", "share of prompt tokens that engines did not compute again", "0–1", "above 0.5 with several turns"),
        _("seconds_data", "waiting for the step's data", "s", "near 0; else sampling is the bottleneck"),
        _("seconds_pack", "arranging trajectories into token forests", "s", "below a tenth of the step"),
        _("seconds_forward", "forward passes", "s", "a third of forward and backward"),
        _("seconds_backward", "backward passes", "s", "two thirds of them"),
        _("seconds_forward_backward", "seconds_forward + seconds_backward", "s", "most of the step"),
        _("seconds_optimizer", "clipping and the optimizer", "s", "below a tenth of the step"),
        _("seconds_publish", "waiting for the publication of the step before", "s", "near 0"),
        _("seconds_publish_background", "writing the newest version, beside training", "s", "below the step"),
        _("seconds_save_background", "writing the newest checkpoint, beside training", "s", "below --save_steps steps"),
        _("published_bytes", "bytes of the newest version's files", "bytes", "few: whole weights are most"),
        _("seconds_device", "with --colocate: waiting until the engine gives the device, and moving weights and moments", "s", "below a tenth of the step"),
    ),
    "Costs": (
        _("gpu_seconds", "time since the step before × ranks of the trainer; 0 with --colocate, whose device the engine's time counts", "s", "near the step's seconds × ranks"),
        _("generate_seconds", "seconds of the model calls of the step's groups, stale and filtered ones included; an engine makes many at a time", "s", "steady"),
        _("tool_seconds", "seconds of the tools and environments of these groups", "s", "below generate_seconds"),
        _("judge_seconds", "seconds of their judges; an answer from the cache takes none", "s", "below generate_seconds"),
        _("api_cost", "money for their judges, fixed models and browse agents, by the prices at the time of each call", "currency", "steady"),
    ),
}  # fmt: skip
"""The definitions by section, in the order of the page."""

DEFINITIONS: Final = {each.name: each for section in SECTIONS.values() for each in section}
"""The definitions by name."""

_PAGE = """\
# Metrics

[中文](zh/metrics.md)

A training step stores these metrics in MongoDB (`TrainStep.metrics`), and sends them to every tracker of `--report_to`
under the same names: `tensorboard`, `wandb`, `swanlab`, `mlflow`, `trackio`, `comet`, `clearml`, or your own
([your_own/index.md](your_own/index.md)), several at once: `--report_to tensorboard,mlflow`. A metric with keys arrives as
`name/key`. A number that is not finite is left out. A tracker that fails or hangs stops nothing; the log says so at the
first failure and then once in ten minutes. πθ is the policy in training, μ the policy that sampled the token, *healthy*
a rule of thumb.
"""

_TRACKERS = """
## Trackers

`pip install -e '.[trackers]'` installs all of them, about a gigabyte; each alone is enough. Without a key or an
address they write below `--output_dir`, and reach no network:

| tracker | writes | goes online with | read it |
|---|---|---|---|
| tensorboard | `tensorboard/RUN/` | – | `tensorboard --logdir FOLDER` |
| wandb | `wandb/offline-run-*` | `WANDB_API_KEY`, `WANDB_MODE` | `wandb sync FOLDER` |
| swanlab | `swanlab/run-*` | `SWANLAB_API_KEY`, `SWANLAB_MODE` | `swanlab sync FOLDER` |
| mlflow | `mlflow.db` | `MLFLOW_TRACKING_URI` | `mlflow ui --backend-store-uri sqlite:///FILE` |
| trackio | `trackio/agentrl.db` | `TRACKIO_SPACE_ID` | `TRACKIO_DIR=FOLDER trackio show` |
| comet | `comet/*.zip` | `COMET_API_KEY` | `comet upload FILE` |
| clearml | `clearml/offline/*.zip` | `CLEARML_API_ACCESS_KEY` | `Task.import_offline_session(FILE)` |

The flags of model, loss, optimizer and training are logged as parameters, without secrets. The command line, the
console, code and the environment are not recorded, and error reports to the makers of wandb and comet are off.

wandb, mlflow and trackio continue a run that is resumed under its `--run_name`; the others begin another one. MLflow
keeps the first value of a parameter; one that a later start has changed is the tag `resumed.NAME`.
"""


def definition_of(name: str) -> str:
    """Return what a metric is, in the words of docs/metrics.md. Raises KeyError for an unknown name."""
    return DEFINITIONS[name].formula


def page() -> str:
    """Return docs/metrics.md."""
    lines = [_PAGE]
    for section, definitions in SECTIONS.items():
        lines += [f"## {section}\n", "| metric | definition | unit | healthy |", "|---|---|---|---|"]
        for each in definitions:
            name = f"`{each.name}/KEY`" if each.keyed else f"`{each.name}`"
            lines.append(f"| {name} | {each.formula} | {each.unit} | {each.healthy} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n" + _TRACKERS


if __name__ == "__main__":
    print(page(), end="")
