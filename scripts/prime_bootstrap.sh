#!/usr/bin/env bash
# The environment for a GPU machine: a .venv with the pinned packages, then the GPUs that it sees.
# Variables: VENV, REQUIREMENTS, EXTRAS of this package (streaming and TensorBoard), and PYTHON, which makes the .venv (3.11 or newer).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv="${VENV:-.venv}"
requirements="${REQUIREMENTS:-requirements-gpu-cu121-torch24.txt}"
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
extras="${EXTRAS-stream,tensorboard}"
# Every package and what it needs is pinned in the file, so nothing is resolved.
"$venv/bin/python" -m pip install --disable-pip-version-check --no-deps -r "$requirements" -c constraints.txt
[ -z "$extras" ] || "$venv/bin/python" -m pip install --disable-pip-version-check -e ".[$extras]" -c constraints.txt
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" "$venv/bin/python" -m nsa.operate.process --text
echo "[done] $venv is ready; activate it with: . $venv/bin/activate"
