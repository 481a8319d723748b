#!/usr/bin/env bash
# Launch of the 50k run: list the GPUs, test causality, then run_2xa100_production.sh, which stops an old run and checks the config.
# MIN_GPUS, STEPS and PRECISION are requirements; CAUSALITY_FLAGS go to run_gpu_causality_test.sh; an empty PREFLIGHT skips the preflight.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/_nsa.sh"
"$python" -m nsa.operate.process --text
bash "$root/scripts/run_gpu_causality_test.sh" ${CAUSALITY_FLAGS---full}
exec bash "$root/scripts/run_2xa100_production.sh" ${PREFLIGHT---preflight} --stop-old --min-gpus "${MIN_GPUS:-2}" \
  --require "train.steps=${STEPS:-50000}" --require "runtime.precision=${PRECISION:-bf16}" --require "train.save_every>0" "$@"
