#!/usr/bin/env bash
# Check that no output depends on a later token, then run the tests of the operator. `--full`: 8192 tokens instead of 1024, and more tests.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="$root/.venv/bin/python"
[ -x "$python" ] || python="${PYTHON:-python}"
NSA_STRICT_ASSERTS=1 exec "$python" "$root/scripts/gpu_causality_test.py" "$@"
