"""`nsa checkpoint verify|show|backup|export|convert`."""

from __future__ import annotations

import json
from pathlib import Path

from nsa.config import ConfigError, DataConfig
from nsa.train.checkpoint import file as checkpoint_file
from nsa.train.checkpoint import find
from nsa.train.checkpoint import folder as checkpoint_folder
from nsa.train.checkpoint.file import BadCheckpoint


def verify(path: Path) -> int:
    """Check a checkpoint, or all in a folder, against the manifest; 1 if any does not match."""
    paths = _paths(path)
    bad = 0
    for one in paths:
        try:
            found = find.verify(one)
            print(f"ok   {one}: step {found.step}, {found.bytes:,} bytes")
        except BadCheckpoint as error:
            bad += 1
            print(f"BAD  {error}")
    print(f"{len(paths) - bad} of {len(paths)} match their manifests")
    return 1 if bad else 0


def show(path: Path) -> int:
    """Print the contents of a checkpoint."""
    # Imports of torch stay inside the commands that need it: it takes seconds.
    from nsa.train.checkpoint.writer import (
        num_tensor_bytes,
    )

    path = _paths(path)[0]
    num_bytes, content = find.verify(path).bytes, find.peek(path, verified=True)
    weights = content["state_dict"]
    expected = num_tensor_bytes(content)
    print(f"{path}: step {content['step']}, {content['tokens_seen']:,} tokens seen")
    print(f"parameters: {sum(x.numel() for x in weights.values()):,} in {len(weights)} tensors")
    print(f"bytes: {num_bytes:,} (tensors alone: {expected:,})")
    for name, value in content["metrics"].items():
        print(f"{name}: {value}")
    for name, value in content["identity"].items():
        print(f"  {name}: {value}")
    return 0


def backup(path: Path, to: Path) -> int:
    """Copy a checkpoint, or the newest in a folder, to another place and verify the copy."""
    copy = find.back_up(_paths(path)[0], to)
    print(f"{copy}: a verified copy")
    return 0


def export(path: Path, to: Path) -> int:
    """Export the weights of a checkpoint or model.pt as safetensors, with the config."""
    from nsa.train.checkpoint.model_file import export_safetensors, read_weights

    content = read_weights(_paths(path)[0])
    metadata = {"format": "pt", "cfg": json.dumps(content["cfg"])}
    export_safetensors(to, content["state_dict"], metadata)
    print(f"{to}: {len(content['state_dict'])} tensors, {to.stat().st_size:,} bytes")
    return 0


def export_hf(path: Path, folder: Path) -> int:
    """Export a checkpoint or model.pt as a folder for transformers, with its tokenizer."""
    from nsa.model import TinyLM
    from nsa.model.folder import save_folder
    from nsa.train.checkpoint.model_file import find_model, load_model

    model, cfg = load_model(find_model(path))
    files, missing = tokenizer_files_of(cfg.data, model.vocab)
    settings, extra = TinyLM.arguments(cfg, model.vocab), {"index_loss": cfg.train.index_loss}
    save_folder(model, settings, folder, files=files, extra=extra)
    num_bytes = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: {len(model.state_dict())} tensors, {num_bytes:,} bytes")
    print(f"no tokenizer: {missing}" if missing else f"tokenizer: {cfg.data.tokenizer}")
    return 0


def tokenizer_files_of(data: DataConfig, vocab: int) -> tuple[dict[str, bytes], str]:
    """The files of the tokenizer that a model was trained with, or why there are none."""
    from nsa.data import open_tokenizer
    from nsa.data.tokenizer_files import tokenizer_files

    try:
        tokenizer = open_tokenizer(data)
    except ConfigError as error:  # its file is gone, or its package is not installed
        return {}, str(error)
    if tokenizer.vocab != vocab:
        reason = f"{tokenizer.name} has {tokenizer.vocab} ids, and the model {vocab}"
        return {}, f"{reason}; it was trained on ids without a text"
    return tokenizer_files(tokenizer), ""


def convert(path: Path, to: Path) -> int:
    """Convert a checkpoint between its two forms: one file, or a folder of shards."""
    source = _paths(path)[0]
    step, forms = find.step_of(source), {checkpoint_file.NAME, checkpoint_folder.NAME}
    allowed = sorted(form.format(step=step) for form in forms)
    if to.name not in allowed:
        raise BadCheckpoint(
            f"{to} cannot be a copy of {source.name}; its name must be {' or '.join(allowed)}"
        )
    if to.exists():
        raise BadCheckpoint(f"{to} exists; remove it, or use another path")
    content = find.read(source)
    # `write` adds the version of the form it writes.
    content.pop("version")
    if checkpoint_file.PATTERN.fullmatch(to.name):
        checkpoint_file.write(to.parent, content)
    else:
        from nsa.train.checkpoint import sharded_io  # slow import: one second

        sharded_io.write(to.parent, content)
    print(f"{to}: step {step}, {find.verify(to).bytes:,} bytes, verified")
    return 0


def _paths(path: Path) -> list[Path]:
    """The checkpoint itself, or all checkpoints of a folder, newest first."""
    if not path.is_dir() or find.is_checkpoint(path):
        return [checkpoint_file.named_by_user(path)]
    paths = find.paths_of(path)
    if not paths:
        raise BadCheckpoint(
            f"{path} has no checkpoint_step{{N}}.pt and no checkpoint_step{{N}}; use a run "
            "folder or a checkpoint"
        )
    return paths
