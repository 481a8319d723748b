#!/usr/bin/env bash
# The production run, phase by phase: `nsa launch --profile production`; flags and overrides as there.
# Variables: CONFIG, NP, DATASET, LOCAL_PATH, OUT_DIR, NSA_PHASE_STEPS, PROFILE, and all of the profile's environment.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/_nsa.sh"
exec "$python" -m nsa.cli launch --profile "${PROFILE:-production}" "$@"
