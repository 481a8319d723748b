"""The commands `nsa checkpoint verify|show|backup|export|convert`."""

from __future__ import annotations

import json
from pathlib import Path

from nsa.train import checkpoint, sharded, shelf
from nsa.train.checkpoint import BadCheckpoint


def verify(path: Path) -> int:
    """Hold a checkpoint, or every one in a folder, to its manifest; 1 where one does not match."""
    paths = _paths(path)
    bad = 0
    for one in paths:
        try:
            found = shelf.verify(one)
            print(f"ok   {one}: step {found.step}, {found.bytes:,} bytes")
        except BadCheckpoint as error:
            bad += 1
            print(f"BAD  {error}")
    print(f"{len(paths) - bad} of {len(paths)} match their manifests")
    return 1 if bad else 0


def show(path: Path) -> int:
    """Print what a checkpoint holds."""
    from nsa.train.saver import num_tensor_bytes  # torch takes seconds: others go without

    path = _paths(path)[0]
    num_bytes, content = shelf.verify(path).bytes, shelf.peek(path, verified=True)
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
    """Copy a checkpoint, or the newest one of a folder, elsewhere, and verify the copy."""
    copy = shelf.back_up(_paths(path)[0], to)
    print(f"{copy}: a verified copy")
    return 0


def export(path: Path, to: Path) -> int:
    """Write the weights of a checkpoint or of model.pt as safetensors, with the config."""
    from nsa.train.export import write_safetensors  # torch takes seconds: others go without
    from nsa.train.model_file import read_weights

    content = read_weights(_paths(path)[0])
    metadata = {"format": "pt", "cfg": json.dumps(content["cfg"])}
    write_safetensors(to, content["state_dict"], metadata)
    print(f"{to}: {len(content['state_dict'])} tensors, {to.stat().st_size:,} bytes")
    return 0


def convert(path: Path, to: Path) -> int:
    """Write a checkpoint in the other form: the file as a folder of parts, a folder as the file."""
    source = _paths(path)[0]
    step, forms = shelf.step_of(source), {checkpoint.NAME, sharded.NAME}
    allowed = sorted(form.format(step=step) for form in forms)
    if to.name not in allowed:
        raise BadCheckpoint(
            f"{to} cannot be a copy of {source.name}; its name must be {' or '.join(allowed)}"
        )
    if to.exists():
        raise BadCheckpoint(f"{to} exists; remove it, or name another place")
    content = shelf.read(source)
    content.pop("version")
    if checkpoint.PATTERN.fullmatch(to.name):
        checkpoint.write(to.parent, content)
    else:
        from nsa.train import dcp  # takes a second to import

        dcp.write(to.parent, content)
    print(f"{to}: step {step}, {shelf.verify(to).bytes:,} bytes, verified")
    return 0


def _paths(path: Path) -> list[Path]:
    """A checkpoint, or those of a folder, newest first."""
    if not path.is_dir() or shelf.is_checkpoint(path):
        return [checkpoint.named_by_user(path)]
    paths = shelf.paths_of(path)
    if not paths:
        raise BadCheckpoint(
            f"{path} holds no checkpoint_step{{N}}.pt and no checkpoint_step{{N}}; name a run "
            "folder or a checkpoint"
        )
    return paths
