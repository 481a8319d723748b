"""Hugging Face: train a small model, export it as a folder, and use it with transformers.

The folder has the config, the weights as safetensors, the tokenizer, and a Python file that imports
nsa.hf. The last part loads it as any program would, by AutoTokenizer and AutoModelForCausalLM.
Three prompts of different lengths are continued in one padded batch; each gets the text that it
gets alone.

    python examples/hugging_face.py [--steps N] [--out-dir DIR]
"""

import argparse
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nsa.cli.__main__ import main
from nsa.config import load_config
from nsa.train import load_model, run

parser = argparse.ArgumentParser(description="Export a model for transformers and use it there.")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--out-dir", type=Path, default=Path("artifacts/hugging_face"))
args = parser.parse_args()
args.out_dir.mkdir(parents=True, exist_ok=True)

# A run, as `nsa train` starts it.
settings = [
    f"train.out_dir={args.out_dir / 'run'}",
    f"train.steps={args.steps}",
    f"train.warmup_steps={args.steps // 10}",
    f"train.eval_every={args.steps}",
    "train.eval_batches=4",
    "train.seq_len=64",
    "runtime.device=cpu",
]
config = load_config("quickstart", settings)
with (args.out_dir / "run.log").open("w") as log:
    result = run(config, config_path="quickstart", out=log, resume="none")
print(f"run: loss {result.metrics.loss_first:.3f} -> {result.metrics.loss_last:.3f}")

# As on the command line: nsa checkpoint export RUN --hf DIR.
folder = args.out_dir / "model"
shutil.rmtree(folder, ignore_errors=True)
main(["checkpoint", "export", str(result.folder), "--hf", str(folder)])
print("files:", *sorted(path.name for path in folder.iterdir()))

# Any program can do this. trust_remote_code: it runs the Python file of the folder.
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True, padding_side="left")
tokenizer.pad_token = tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
ours, _ = load_model(result.folder / "model.pt")
pairs = zip(ours.state_dict().values(), model.model.state_dict().values(), strict=True)
assert all(torch.equal(one, other) for one, other in pairs)
print(f"loaded: {type(model).__name__}, {model.num_parameters()} parameters, all bit-equal")

prompts = ["The ", "What is the matter, ", "O"]
batch = tokenizer(prompts, return_tensors="pt", padding=True)
texts = model.generate(**batch, max_new_tokens=24, do_sample=False)
for prompt, text in zip(prompts, texts, strict=True):
    alone = model.generate(
        **tokenizer(prompt, return_tensors="pt"), max_new_tokens=24, do_sample=False
    )
    assert torch.equal(text[-24:], alone[0, -24:])
    print(f"text: {prompt!r} + {tokenizer.decode(text[-24:])!r}")
