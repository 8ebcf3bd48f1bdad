#!/usr/bin/env bash
# Run the whole loop on this machine: MongoDB, tool servers, an engine, two samplers and a trainer.
#
#   bash scripts/quickstart.sh                    a real 135M model learns to use a calculator (under three minutes of training)
#   bash scripts/quickstart.sh --tiny             a two-layer model that is made here (four to five minutes)
#   bash scripts/quickstart.sh --engine sglang    the same with a SGLang server (or vllm)
#   bash scripts/quickstart.sh --steps 2          two optimizer steps
#
# Ctrl-C stops everything when the trainer has saved its step (a second one at once); the same command resumes.
set -euo pipefail
. "$(dirname "$0")/lib/common.sh"
cd "$(dirname "$0")/.."
step bash scripts/setup.sh
for engine in sglang vllm; do
  case " $* " in *" $engine "* | *"=$engine "*) step bash "scripts/setup_$engine.sh" ;; esac
done
exec "${AGENTRL_VENV:-.venv}/bin/python" -m agentrl quickstart "$@"
