"""Train a small byte model on a text file of your own, then let it write.

Cuts the text into documents, writes a config that inherits the bundled `quickstart`, trains by it
as `nsa train --config FILE` does, loads the model from its file and continues a prompt. Without a
path it takes one of the plays that come with the package.

    python examples/train_on_your_text.py [FILE] [--steps N] [--out-dir DIR] [--prompt TEXT]
"""

import argparse
import json
from importlib.resources import files
from pathlib import Path

from nsa.config import load_config
from nsa.data import open_tokenizer
from nsa.generate import Completions, Limits, Sampling
from nsa.train import load_model, run

DOCUMENT_CHARS = 1000
"""A document ends with the paragraph that reaches this length."""
CONFIG = """\
# Only what differs from the bundled quickstart; docs/configuration.md explains every key.
inherits: quickstart.yaml
train:
  steps: {steps}
  seq_len: 128
  warmup_steps: {warmup}
  eval_every: {steps}
  eval_batches: 4
  out_dir: {folder}/run
data:
  dataset: fineweb_edu_local  # local documents: .jsonl, .txt, .parquet, or a folder of them
  local_path: {folder}/documents.jsonl
runtime:
  device: cpu
"""


def write_documents(text: str, file: Path) -> int:
    """Write the text as JSON lines, one document each; return their number.

    Whole documents are held out for the evaluation, so one text has to become several.
    """
    documents = [""]
    for paragraph in text.split("\n\n"):
        if len(documents[-1]) >= DOCUMENT_CHARS:
            documents.append("")
        documents[-1] += paragraph + "\n\n"
    file.write_text("".join(json.dumps({"text": one}) + "\n" for one in documents))
    return len(documents)


parser = argparse.ArgumentParser(description="Train a small byte model on a text file.")
parser.add_argument("text", nargs="?", type=Path, metavar="FILE", help="in UTF-8")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--out-dir", type=Path, default=Path("artifacts/your_text"))
parser.add_argument("--prompt", default="The ")
args = parser.parse_args()
folder: Path = args.out_dir
folder.mkdir(parents=True, exist_ok=True)

# --- 1. The text and the config ---

if args.text is None:
    args.text = folder / "hamlet.txt"
    args.text.write_bytes(files("nsa.data").joinpath("corpus/hamlet.txt").read_bytes())
num_documents = write_documents(args.text.read_text(encoding="utf-8"), folder / "documents.jsonl")
print(f"text: {args.text}, {args.text.stat().st_size} bytes in {num_documents} documents")
config_file = folder / "config.yaml"
config_file.write_text(CONFIG.format(steps=args.steps, warmup=args.steps // 10, folder=folder))

# --- 2. The training; resume="none" starts over where an earlier call has left its files ---

with (folder / "train.log").open("w") as log:
    result = run(load_config(config_file), config_path=str(config_file), out=log, resume="none")
metrics = result.metrics
print(f"model: {metrics.num_params} parameters, {metrics.tokens_per_step} bytes per step")
print(f"loss: {metrics.loss_first:.2f} -> {metrics.loss_last:.2f} nats per byte ", end="")
print(f"in {metrics.step} steps, held out {metrics.val_loss:.2f}")

# --- 3. The model file, as another program would use it ---

model, config = load_model(result.folder / "model.pt")
writer = Completions(
    model,
    open_tokenizer(config.data),
    Sampling(temperature=0.5, seed=0),
    Limits(max_new_tokens=60),
)
(completion,) = writer.complete([args.prompt])
print(f"text: {args.prompt!r} + {completion.text!r}")
print(f"more: nsa generate {args.prompt!r} --model {result.folder}")
