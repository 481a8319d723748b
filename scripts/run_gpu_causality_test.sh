#!/usr/bin/env bash
# Show that no output depends on a later token. `--full`: 8192 tokens instead of 1024.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="$root/.venv/bin/python"
[ -x "$python" ] || python="${PYTHON:-python}"
NSA_STRICT_ASSERTS=1 exec "$python" "$root/scripts/gpu_causality_test.py" "$@"
