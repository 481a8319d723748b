"""model.pt (weights with the config that builds the model), model folders, and export to
safetensors.

Schema of model.pt: a dict of `state_dict` (fp32 tensors on the CPU) and `cfg` (the resolved config
as plain dicts). Checkpoints (find.py) have both keys too, so a model can be loaded from either. All
of it loads with `torch.load(..., weights_only=True)`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa.config import Config, DataConfig, Setting, build, known_keys, to_container
from nsa.config.check import FILE_NAME
from nsa.config.schema import VOCABULARIES
from nsa.files import is_regular, read_text, replacing
from nsa.model import TinyLM
from nsa.model.folder import SkipInit, is_folder
from nsa.model.pretrained import read_folder
from nsa.train.checkpoint import find
from nsa.train.checkpoint.file import Unreadable, load_tensors, named_by_user

NAME = "model.pt"


class BadModelFile(ValueError):
    """A file that no model can be loaded from; the message says why and what to do."""


def save_model(path: Path, model: TinyLM, cfg: Config) -> Path:
    """Write the model atomically."""
    weights = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    with replacing(path) as temporary:
        torch.save({"state_dict": weights, "cfg": to_container(cfg)}, temporary)
    return path


def find_model(path: Path) -> Path:
    """A file or model folder itself; for a run folder its model.pt, or its newest checkpoint."""
    if not path.is_dir() or find.is_checkpoint(path) or is_folder(path):
        return named_by_user(path)
    saved = find.paths_of(path)
    return path / NAME if is_regular(path / NAME) or not saved else saved[0]


def load_model(path: Path) -> tuple[TinyLM, Config]:
    """Load the model of a file or folder on the CPU, in evaluation mode, with its config.

    A checkpoint is verified against its manifest first. Names and shapes are compared before
    anything of the configured size is allocated: a small malicious file must not use much memory.
    """
    if is_folder(path):
        found = read_folder(path)
        vocab: int = found.settings["vocab"]
        cfg = config_of(found.settings, tokenizer_of(path, vocab), str(path))
        model = meta_model(cfg, vocab)
        model.load_state_dict(found.weights, strict=True, assign=True)
        return model.float().requires_grad_().eval(), cfg
    content = read_weights(path)
    weights, cfg = content["state_dict"], _config(content["cfg"], path)
    _check_layers(weights, cfg, path)
    model = meta_model(cfg, _vocab(weights, path))
    _check_shapes(weights, model.state_dict(), path)
    # assign: the tensors of the file become the parameters; nothing is copied.
    model.load_state_dict(weights, strict=True, assign=True)
    return model.float().requires_grad_().eval(), cfg


def meta_model(cfg: Config, vocab: int) -> TinyLM:
    """The model of a config without values."""
    with torch.device("meta"), SkipInit():
        return TinyLM.from_config(cfg, vocab=vocab)


def config_of(settings: Mapping[str, Any], data: DataConfig, origin: str) -> Config:
    """The config that builds the model of TinyLM's arguments; all else has its default."""
    known = known_keys()
    given = [
        Setting(f"{group}.{name}", value, origin)
        for name, value in settings.items()
        for group in ("model", "nsa")
        if f"{group}.{name}" in known
    ]
    given += [Setting(f"data.{k}", v, origin) for k, v in dataclasses.asdict(data).items()]
    return build(given)


def tokenizer_of(folder: Path, vocab: int) -> DataConfig:
    """The tokenizer of a model folder: its file, or else a fixed one with as many ids."""
    if not is_regular(folder / FILE_NAME):
        fixed = [name for name, size in VOCABULARIES.items() if size == vocab]
        return DataConfig(tokenizer=fixed[0]) if fixed else DataConfig()
    return DataConfig(tokenizer=str(folder / FILE_NAME), eos=_eos_of(folder))


def _eos_of(folder: Path) -> str:
    """The EOS that the folder's tokenizer declares; empty if it declares none."""
    if not is_regular(folder / "tokenizer_config.json"):
        return ""
    try:
        mark = json.loads(read_text(folder / "tokenizer_config.json")).get("eos_token")
    except (ValueError, AttributeError):
        raise BadModelFile(
            f"{folder / 'tokenizer_config.json'} is not a JSON object; copy the folder again, or "
            "remove the file"
        ) from None
    return str(mark.get("content", "") if isinstance(mark, dict) else mark or "")


def weights_sha256(weights: dict[str, Tensor]) -> str:
    """A hash of names, dtypes, shapes and values; independent of the file format."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_weights(path: Path) -> dict[str, Any]:
    """The `state_dict` and `cfg` of a model file or a checkpoint, unchecked."""
    if find.is_checkpoint(path):
        # Drop the optimizer state: for AdamW it is twice as large as the weights.
        return find.fill(path, find.peek(path) | {"optimizer": {}})
    if not path.exists():
        raise BadModelFile(
            f"{path} does not exist; use a model.pt, a checkpoint_step{{N}}.pt or a run folder"
        )
    try:
        content = load_tensors(path, sums=True)
    except Unreadable as error:
        raise BadModelFile(
            f"{path} cannot be read as a model ({error.reason}); name a model.pt that a run has "
            "written"
        ) from None
    keys = ("state_dict", "cfg")
    if not isinstance(content, dict) or not all(isinstance(content.get(k), dict) for k in keys):
        raise BadModelFile(
            f"{path} has no weights with their config (state_dict and cfg); name a model.pt or a "
            "checkpoint that a run has written"
        )
    return content


def _config(groups: dict[str, Any], path: Path) -> Config:
    wrong = [group for group, values in groups.items() if not isinstance(values, dict)]
    if wrong:
        raise BadModelFile(f"{path}: cfg.{wrong[0]} is not a group of settings; use another file")
    return build(
        [
            Setting(f"{group}.{key}", value, str(path))
            for group, values in groups.items()
            for key, value in values.items()
        ]
    )


def _vocab(weights: dict[str, Any], path: Path) -> int:
    embedding = weights.get("embed.weight")
    if not isinstance(embedding, torch.Tensor) or embedding.dim() != 2 or not len(embedding):
        raise BadModelFile(f"{path} has no embedding (embed.weight); use another file")
    return len(embedding)


def _check_layers(weights: dict[str, Any], cfg: Config, path: Path) -> None:
    """Check the number of layers before the model is built: even a meta layer takes time."""
    names = [str(name).split(".") for name in weights]
    layers = {parts[1] for parts in names if parts[0] == "blocks" and len(parts) > 1}
    if len(layers) != cfg.model.n_layers:
        raise BadModelFile(
            f"{path} holds {len(layers)} layers, its config says {cfg.model.n_layers}: they are "
            "not of one model; use another file"
        )


def _check_shapes(weights: dict[str, Any], expected: dict[str, Any], path: Path) -> None:
    for name in sorted(expected.keys() | weights.keys()):
        given = list(weights[name].shape) if isinstance(weights.get(name), torch.Tensor) else None
        needed = list(expected[name].shape) if name in expected else None
        if given != needed:
            raise BadModelFile(
                f"{path}: {name} is {given or 'not there'}, the model of its config has "
                f"{needed or 'no such tensor'}: they are not of one model; use another file"
            )


def export_safetensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> Path:
    """Write tensors and texts as a safetensors file, atomically."""
    from safetensors.torch import save_file  # here: only the export needs it

    # Copies, because safetensors refuses tensors that share memory, as tied weights do.
    copies = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    with replacing(path) as temporary:
        save_file(copies, temporary, metadata)
    return path
