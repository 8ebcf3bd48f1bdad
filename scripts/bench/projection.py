"""Measure what per-token temperatures and the entropy gradient add to the cost of logprobs.

    python scripts/bench/projection.py [--quick] [--tokens N] [--vocabulary N] [--hidden N] [--rounds N]

Times forward and backward of ``token_logprobs``, on the GPU if there is one. Every round runs each variant
once. A ratio is the median over the rounds of variant ÷ baseline. Seconds are CPU seconds of the process, or
wall-clock seconds on a GPU. Exits with 1 if a ratio misses its target.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from harness import Row, bench_parser, finish

from agentrl.model.logprobs import OutputHead, token_logprobs

BASELINE = "one number"
LIMITS = {"a tensor, all equal": 1.05, "a tensor, uneven": 1.1, "gradient of the entropy": 1.2}
"""The largest allowed ratio to the baseline, a single number as the temperature."""


def variants(tokens: int, vocabulary: int, hidden: int) -> dict[str, Callable[[], None]]:
    """Return each variant as a function that runs it once."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    states = torch.randn(tokens, hidden, device=device, dtype=dtype, requires_grad=True)
    weight = (torch.randn(vocabulary, hidden, device=device, dtype=dtype) * hidden**-0.5).requires_grad_()
    parent = torch.arange(tokens, device=device)
    target = torch.randint(0, vocabulary, (tokens,), device=device)

    def variant(**options: Any) -> Callable[[], None]:
        def run() -> None:
            logprobs, entropy = token_logprobs(states, OutputHead(weight), parent, target, **options)
            loss = logprobs.sum()
            if entropy.requires_grad:
                loss = loss - 0.01 * entropy.sum()
            torch.autograd.grad(loss, (states, weight))

        return run

    return {
        BASELINE: variant(temperature=0.7),
        "a tensor, all equal": variant(temperature=torch.full((tokens,), 0.7)),
        "a tensor, uneven": variant(temperature=torch.linspace(0.5, 1.2, tokens)),
        "gradient of the entropy": variant(temperature=0.7, entropy_gradient=True),
    }


def seconds(run: Callable[[], None]) -> float:
    """Return the CPU seconds of one call, or its wall-clock seconds on a GPU."""
    on_gpu = torch.cuda.is_available()
    clock = time.perf_counter if on_gpu else time.process_time
    started = clock()
    run()
    if on_gpu:
        torch.cuda.synchronize()
    return clock() - started


def main() -> int:
    """Run the benchmark and print its table. Return 1 if a ratio misses its target."""
    parser = bench_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=2048, help="default: 2048")
    parser.add_argument("--vocabulary", type=int, default=32768, help="vocabulary size (default: 32768)")
    parser.add_argument("--hidden", type=int, default=576, help="hidden size (default: 576)")
    parser.add_argument("--rounds", type=int, default=7, help="default: 7")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.tokens, arguments.vocabulary, arguments.hidden, arguments.rounds = 64, 512, 32, 1
    runs = variants(arguments.tokens, arguments.vocabulary, arguments.hidden)
    for run in runs.values():
        seconds(run)
    rounds = [{name: seconds(run) for name, run in runs.items()} for _ in range(arguments.rounds)]
    rows = [
        Row(
            what=name, ours=f"{min(each[name] for each in rounds):.3f} s",
            baseline=f"{min(each[BASELINE] for each in rounds):.3f} s",
            ratio=statistics.median(each[name] / each[BASELINE] for each in rounds),
            target=limit, more=False,
        )
        for name, limit in LIMITS.items()
    ]  # fmt: skip
    what = f"logprobs of {arguments.tokens} tokens over {arguments.vocabulary} ids"
    return finish(what, rows, quick=arguments.quick)


if __name__ == "__main__":
    sys.exit(main())
