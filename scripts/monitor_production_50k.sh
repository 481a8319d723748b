#!/usr/bin/env bash
# Show a production run: `nsa monitor` on OUT_DIR, or on the folder given; flags as there.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="$root/.venv/bin/python"
[ -x "$python" ] || python="${PYTHON:-python}"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m nsa.cli monitor "$@"
