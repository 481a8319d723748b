"""Switch a Llama to sparse attention: convert it, warm up its indexer, and fine-tune it.

A tiny Llama of transformers is trained on bytes for some steps, as a stand-in for a pretrained one.
`sparsify` makes a model folder of it whose layers read chosen blocks. With all blocks chosen the
logits are those of the Llama; with few, the indexer must learn which ones matter: alone at first,
from dense attention, then with the whole model.

    python examples/switch_llama.py [--steps N] [--out-dir DIR]     (needs the extra hf)
"""

import argparse
import shutil
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from nsa.config import DataConfig, load_config
from nsa.data import open_data
from nsa.train import load_model, run
from nsa.train.sparsify import sparsify

parser = argparse.ArgumentParser(description="Switch a tiny Llama to sparse attention.")
parser.add_argument("--steps", type=int, default=60, help="of the Llama; fine-tuning has half")
parser.add_argument("--out-dir", type=Path, default=Path("artifacts/switch_llama"))
args = parser.parse_args()
shutil.rmtree(args.out_dir, ignore_errors=True)
logging.disable_progress_bar()
LENGTH = 256

# A Llama with grouped heads; its vocabulary are bytes.
torch.manual_seed(0)
llama = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
)
data = open_data(DataConfig(dataset="shakespeare"), LENGTH, seed=0)
optimizer = torch.optim.AdamW(llama.parameters(), lr=4e-3)
for step in range(args.steps):
    rows = data.train.batch(2 * step, 2)
    loss = llama(input_ids=rows[:, :-1], labels=rows[:, :-1]).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
llama.eval().save_pretrained(args.out_dir / "llama")
print(f"llama: {args.steps} steps, loss {loss.item():.3f}")

# All blocks: the same function. Few blocks: 4 of 16 per query, chosen by a learned indexer.
given = {"rule": "msa", "say": lambda line: None}
blocks = ["nsa.l_sel=16", "nsa.d_index=16"]
sparsify(args.out_dir / "llama", args.out_dir / "all", overrides=[*blocks, "nsa.n_sel=16"], **given)
sparsify(args.out_dir / "llama", args.out_dir / "few", overrides=[*blocks, "nsa.n_sel=4"], **given)
ids = data.val.batch(0, 1)[:, :-1]
with torch.no_grad():
    logits = llama(ids).logits
    for name in ("all", "few"):
        model, _ = load_model(args.out_dir / name)
        error = (model(ids) - logits).abs().max() / logits.abs().max()
        print(f"{name} blocks: logits differ from the Llama's by {error:.1e}")

# The folder has the config with which training continues: its weights, its shape, its warm-up.
steps = args.steps // 2
config = load_config(
    args.out_dir / "few" / "train.yaml",
    [
        f"train.out_dir={args.out_dir / 'run'}",
        f"train.steps={steps}",
        f"train.seq_len={LENGTH}",
        "train.batch_size=2",
        "train.lr=1e-3",
        f"train.index_warmup_steps={steps // 2}",
        f"train.eval_every={steps}",
        "train.eval_batches=4",
        "data.dataset=shakespeare",
        "runtime.device=cpu",
        "runtime.precision=fp32",
    ],
)
with (args.out_dir / "run.log").open("w") as log:
    metrics = run(config, config_path="train.yaml", out=log).metrics
print(f"fine-tuned: {steps} steps, the indexer alone for {steps // 2}: ", end="")
print(f"loss {metrics.loss_first:.3f} -> {metrics.loss_last:.3f}, held out {metrics.val_loss:.3f}")
print(f"more: nsa generate 'The ' --model {args.out_dir / 'run'}")
