#!/usr/bin/env bash
# Validation before the production run: GPUs, 200 synthetic steps, 1000 on data, and a verdict from their artifacts.
# Variables and flags as in run_2xa100_production.sh.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/_nsa.sh"
"$python" -m nsa.operate.process --text
exec "$python" -m nsa.cli launch --profile "${PROFILE:-m7c}" "$@"
