#!/usr/bin/env bash
# The pilot, in one command: config by GPU memory, processes by GPUs, a smoke test, then the long run or its continuation.
# Variables and flags as in run_2xa100_production.sh.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/_nsa.sh"
exec "$python" -m nsa.cli launch --profile "${PROFILE:-prime}" "$@"
