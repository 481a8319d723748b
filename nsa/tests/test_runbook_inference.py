"""The greedy inference of the runbook, as it is written there, with bytes and with GPT-2's ids.

On a machine without a GPU the text changes in two words: the device, and bfloat16, in which a CPU
without such instructions would need minutes for GPT-2's output head.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from nsa.config import load_config
from nsa.config.env import changed
from nsa.data import ByteTokenizer
from nsa.model import TinyLM
from nsa.tests.conftest import REPOSITORY
from nsa.tests.data.test_tokenizers import write_gpt2
from nsa.tests.support.gpu import needs_gpu
from nsa.train import save_model

MODEL = """\
model = TinyLM(
  vocab={vocab},
  dim=int(cfg.model.dim), n_layers=int(cfg.model.get('n_layers',1)),
  n_heads=int(cfg.model.n_heads), n_kv_groups=int(cfg.model.n_kv_groups),
  d_k=int(cfg.model.d_k), d_v=int(cfg.model.d_v),
  l=int(cfg.nsa.l), d=int(cfg.nsa.d), l_sel=int(cfg.nsa.l_sel), \
n_sel=int(cfg.nsa.n_sel), w=int(cfg.nsa.w),
  grad_checkpointing=False,
).to('cuda').eval().to(dtype=torch.bfloat16)
model.load_state_dict(ckpt['state_dict'], strict=True)
"""
HEAD = """\
import torch
from omegaconf import OmegaConf
from scripts.train_showcase import TinyLM
ckpt = torch.load('artifacts/train_showcase/model.pt', map_location='cuda:0')
cfg = OmegaConf.create(ckpt['cfg'])
"""
LOOP = """\
for _ in range(64):
  logits = model(ids)[:, -1, :]
  next_id = torch.argmax(logits, dim=-1, keepdim=True)
  ids = torch.cat([ids, next_id], dim=1)
"""
BYTES = (
    HEAD
    + MODEL.format(vocab=256)
    + """\
ids = torch.tensor([[72,101,108,108,111,32,78,83,65,33,32]], dtype=torch.long, device='cuda')
"""
    + LOOP
    + """\
print(bytes(int(t) for t in ids[0].tolist()).decode('utf-8', errors='ignore'))
"""
)
GPT2 = (
    HEAD
    + """\
from transformers import GPT2Tokenizer
tok = GPT2Tokenizer.from_pretrained('gpt2')
"""
    + MODEL.format(vocab="tok.vocab_size")
    + """\
ids = torch.tensor([tok.encode('Hello NSA! ')], dtype=torch.long, device='cuda')
"""
    + LOOP
    + """\
print(tok.decode(ids[0].tolist()))
"""
)
STAND_IN = '''\
"""The two methods that the runbook calls, on this project's own GPT-2 tokenizer."""
from pathlib import Path
from nsa.data.tokenizers import GPT2Tokenizer as Ours

class GPT2Tokenizer:
    def __init__(self, folder):
        self._ours, self.vocab_size = Ours(Path(folder)), Ours.vocab

    from_pretrained = classmethod(lambda cls, folder: cls(folder))

    def encode(self, text):
        return self._ours.encode(text).tolist()

    def decode(self, ids):
        return self._ours.decode(ids)
'''
DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=needs_gpu)]


def saved_model(folder: Path, vocab: int) -> None:
    """A fresh model with the showcase's blocks, where the runbook looks for it."""
    torch.manual_seed(0)
    sizes = ["model.dim=32", "model.n_heads=4", "model.d_k=8", "model.d_v=8"]
    cfg = load_config(REPOSITORY / "configs" / "train_showcase.yaml", sizes, environ={})
    model = TinyLM.from_config(cfg, vocab)
    save_model(folder / "artifacts" / "train_showcase" / "model.pt", model, cfg)


def run_snippet(text: str, folder: Path, device: str, *more: Path) -> str:
    """`PYTHONPATH=. python - <<'PY'` in a folder; its stdout."""
    if device == "cpu":
        text, num_changes = re.subn(r"'cuda(:0)?'", "'cpu'", text)
        assert num_changes == 3
        text = text.replace("torch.bfloat16", "torch.float32")
    done = subprocess.run(
        [sys.executable, "-"],
        input=text,
        cwd=folder,
        env=changed({"PYTHONPATH": ":".join(map(str, (REPOSITORY, *more))), "PYTHONUTF8": "1"}),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("device", DEVICES)
def test_greedy_inference_with_bytes_runs_as_written(tmp_path: Path, device: str) -> None:
    saved_model(tmp_path, ByteTokenizer.vocab)
    assert run_snippet(BYTES, tmp_path, device).startswith("Hello NSA! ")


@pytest.mark.parametrize("device", DEVICES)
def test_greedy_inference_with_gpt2_runs_as_written(tmp_path: Path, device: str) -> None:
    """With transformers where it is installed; else with a stand-in for its tokenizer alone.

    The vocabulary has the size and the form of GPT-2's, in a folder that both can read.
    """
    pytest.importorskip("tiktoken")
    saved_model(tmp_path, 50257)
    (tmp_path / "gpt2").mkdir()
    write_gpt2(tmp_path / "gpt2", "vocab.json", "merges.txt")
    package = tmp_path / "packages"
    if find_spec("transformers") is None:
        (package / "transformers").mkdir(parents=True)
        (package / "transformers" / "__init__.py").write_text(STAND_IN)
    out = run_snippet(GPT2, tmp_path, device, package)
    assert out.startswith("Hello NSA! ")
    assert len(out) > len("Hello NSA! ") + 10
