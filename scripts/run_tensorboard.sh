#!/usr/bin/env bash
# TensorBoard on the events of a run: [LOGDIR], by default of the pilot. Variables: LOGDIR, PORT, HOST.
# It listens on localhost only; from another machine: ssh -L 6006:localhost:6006 USER@HOST.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/_nsa.sh"
exec "$python" -m tensorboard.main --logdir "${1:-${LOGDIR:-artifacts/m7c_125m/tb}}" --port "${PORT:-6006}" --host "${HOST:-127.0.0.1}"
