"""A model folder, as Hugging Face's tools read it: config.json, safetensors, tokenizer files.

The weights are a TinyLM's under the name `model.`, in one file or in shards with an index. The
config has TinyLM's arguments, with `vocab_size` for `vocab`. `auto_map` names a small Python file
of the folder that imports nsa.hf, so that transformers finds the classes by itself. Nothing here
needs transformers.
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nsa.files import explain, put_in_place, read_text, temporary_name
from nsa.model.lm import TinyLM

MODEL_TYPE = "nsa"
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PREFIX = "model."
"""Names of weights are those of TinyLM after this: NSAForCausalLM holds one as `model`."""
SHARD_BYTES = 5 << 30
"""Largest file of weights, unless the caller says otherwise."""
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
RUNTIME = ("backend", "grad_checkpointing", "gc_layers")
"""Arguments that say how one run computes, not what the model is; a folder has their defaults."""
CODE = "modeling_nsa.py"
AUTO_MAP = {
    "AutoConfig": "modeling_nsa.NSAConfig",
    "AutoModelForCausalLM": "modeling_nsa.NSAForCausalLM",
}
CODE_TEXT = '''"""The classes of this model; they are in the package nsa, with its extra hf."""

from nsa.hf import NSAConfig, NSAForCausalLM

__all__ = ["NSAConfig", "NSAForCausalLM"]
'''


class BadFolder(ValueError):
    """A folder that no model can be loaded from, or written to; says why and what to do."""


# --- the config ---


@cache
def arguments() -> dict[str, inspect.Parameter]:
    """TinyLM's arguments by name: the fields of a config."""
    given = inspect.signature(TinyLM).parameters
    hints = get_type_hints(TinyLM.__init__)
    return {name: one.replace(annotation=hints[name]) for name, one in given.items()}


def to_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The content of config.json for TinyLM's arguments."""
    full = {name: one.default for name, one in arguments().items()} | dict(settings)
    full |= {name: arguments()[name].default for name in RUNTIME}
    return {
        "model_type": MODEL_TYPE,
        "architectures": ["NSAForCausalLM"],
        "auto_map": AUTO_MAP,
        "vocab_size": full.pop("vocab"),
        "tie_word_embeddings": full["tie_embeddings"],
        **full,
    }


def from_config(config: Mapping[str, Any], where: Path | str) -> dict[str, Any]:
    """TinyLM's arguments from the content of a config.json; other keys are not looked at."""
    kind = config.get("model_type")
    if kind != MODEL_TYPE:
        raise BadFolder(
            f"{where} describes a model of type {kind!r}, not {MODEL_TYPE!r}; give a folder that "
            "`nsa checkpoint export --hf` or `nsa sparsify` has written, or convert it first"
        )
    found: dict[str, Any] = {}
    for name, one in arguments().items():
        key = "vocab_size" if name == "vocab" else name
        if key in config:
            found[name] = _checked(key, config[key], one, where)
        elif one.default is inspect.Parameter.empty:
            raise BadFolder(f"{where} has no {key}; a model of type nsa needs it: add it")
    return found


def _checked(key: str, value: Any, one: inspect.Parameter, where: Path | str) -> Any:
    """The value of an argument, if it has the type of TinyLM's signature."""
    kind = one.annotation
    if kind is float and type(value) is int:
        return float(value)
    if kind not in (int, float, bool, str):  # gc_layers: JSON has lists for tuples
        return tuple(value) if isinstance(value, list) else value
    if type(value) is not kind:
        raise BadFolder(f"{where}: {key} is {value!r}; it must be of type {kind.__name__}: edit it")
    return value


# --- writing ---


def save_folder(
    model: TinyLM,
    settings: Mapping[str, Any],
    folder: Path,
    *,
    files: Mapping[str, bytes] | None = None,
    extra: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write a model as a new folder.

    `settings` are the arguments that built the model, `files` those of its tokenizer by name,
    `extra` further entries of config.json, such as eos_token_id. The folder gets its name when all
    of it is on the disk.
    """
    weights = {PREFIX + name: tensor for name, tensor in model.state_dict().items()}
    config = to_config(settings) | {"dtype": str(next(iter(weights.values())).dtype)[6:]}
    texts = {CONFIG: _json(config | dict(extra or {})), CODE: CODE_TEXT.encode()}
    check_free(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(folder)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        for name, content in {**texts, **(files or {})}.items():
            (temporary / name).write_bytes(content)
        _write_shards(temporary, weights, shard_bytes)
        mode = (temporary / CONFIG).stat().st_mode
        for path in temporary.iterdir():
            path.chmod(mode)  # safetensors writes files that only their owner can read
            put_in_place(path, path)  # to the disk, before the folder has its name
        put_in_place(temporary, folder)
    except OSError as error:
        need = sum(one.nbytes for one in weights.values())
        raise BadFolder(f"{folder} was not written: {explain(error, folder, need)}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def check_free(folder: Path) -> None:
    """Refuse to write where something is."""
    is_new = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if folder.is_symlink() or not is_new:
        raise BadFolder(
            f"{folder} exists; a model is written to a new or an empty folder: remove it, or name "
            "another one"
        )


def _write_shards(folder: Path, weights: Mapping[str, Tensor], most_bytes: int) -> None:
    """One file, or shards of at most `most_bytes` (or of one tensor) with their index."""
    shards: list[dict[str, Tensor]] = []
    left = -1
    for name, tensor in weights.items():
        if tensor.nbytes > left:
            shards.append({})
            left = most_bytes
        shards[-1][name] = tensor.detach().cpu().contiguous()
        left -= tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / WEIGHTS, {"format": "pt"})
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, {"format": "pt"})
        places |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / INDEX).write_bytes(_json(index))


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


# --- reading ---


def is_folder(path: Path) -> bool:
    """Whether a path is a folder with a config.json: one to load with `load_folder`."""
    return path.is_dir() and (path / CONFIG).exists()


def load_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """TinyLM's arguments and its state dict, compared with each other, on the CPU.

    Names and shapes are compared before any tensor is read, and before a model is built.
    """
    settings = from_config(read_config(folder), folder / CONFIG)
    places = tensor_files(folder)
    expected = _expected(settings, places, folder)
    weights: dict[str, Tensor] = {}
    for file in sorted(set(places.values())):
        weights |= _read_shard(folder / file, [n for n in places if places[n] == file], expected)
    return settings, {name.removeprefix(PREFIX): weights[name] for name in expected}


def read_config(folder: Path) -> dict[str, Any]:
    """The content of config.json."""
    if not folder.is_dir():
        raise BadFolder(f"{folder} is not a folder; give one with config.json and safetensors")
    content = _read_json(folder / CONFIG)
    if not isinstance(content, dict):
        raise BadFolder(f"{folder / CONFIG} is not a JSON object; use another folder")
    return content


def _read_json(path: Path) -> Any:
    try:
        return json.loads(read_text(path))
    except OSError as error:
        raise BadFolder(
            f"{path} cannot be read ({error.strerror}); a model folder has it as a regular file: "
            "copy the folder with all of its files"
        ) from None
    except ValueError as error:
        raise BadFolder(f"{path} is not JSON ({error}); use another copy of the folder") from None


def tensor_files(folder: Path) -> dict[str, str]:
    """The file of each tensor: from the index, or all in one file."""
    if (folder / INDEX).is_file():
        index = _read_json(folder / INDEX)
        places = index.get("weight_map") if isinstance(index, dict) else None
        plain = re.compile(r"[\w-][\w.-]*\.safetensors")
        if not isinstance(places, dict) or not all(
            isinstance(file, str) and plain.fullmatch(file) for file in places.values()
        ):
            raise BadFolder(
                f"{folder / INDEX} has no weight_map of names to safetensors files of this folder; "
                "use another copy"
            )
        return places
    if not (folder / WEIGHTS).exists():
        raise BadFolder(_no_weights(folder))
    with open_weights(folder / WEIGHTS) as file:
        return dict.fromkeys(file.keys(), WEIGHTS)


def _no_weights(folder: Path) -> str:
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED)
    if pickled:
        return (
            f"{folder} has pickled weights ({pickled[0]}), and a pickle can run any code; weights "
            f"are read from {WEIGHTS} only: save the model again with save_pretrained"
        )
    return f"{folder} has no weights; {WEIGHTS} or {INDEX} with its shards is needed: copy them"


def open_weights(path: Path) -> Any:
    """A safetensors file that is no link and no pipe."""
    if path.is_symlink() or not path.is_file():
        what = "is a link" if path.is_symlink() else "is not there"
        raise BadFolder(
            f"{path} {what}; weights are read from regular files of the folder: copy them into it"
        )
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise BadFolder(
            f"{path} is not a whole safetensors file ({error}); copy or export it again"
        ) from None


def _expected(
    settings: Mapping[str, Any], places: Mapping[str, str], folder: Path
) -> dict[str, Tensor]:
    """The tensors of the model, on the meta device; refuses a folder with others, or fewer."""
    layers = {name.split(".")[2] for name in places if name.startswith(f"{PREFIX}blocks.")}
    # Before the model is built: a small file must not make us build a million layers.
    if len(layers) != settings["n_layers"]:
        raise BadFolder(
            f"{folder} has weights of {len(layers)} layers, its config says "
            f"{settings['n_layers']}: they are not of one model; use another copy"
        )
    with torch.device("meta"), SkipInit():
        model = TinyLM(**settings)
    expected = {PREFIX + name: tensor for name, tensor in model.state_dict().items()}
    for what, names in (
        ("has no", expected.keys() - places.keys()),
        ("has an unknown", places.keys() - expected.keys()),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise BadFolder(
                f"{folder} {what} tensor {min(names)}{more}; its config describes a model of "
                f"{len(expected)} tensors with other names: use the weights of this config"
            )
    return expected


def _read_shard(
    path: Path, names: list[str], expected: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one file, each compared with the model's before it is read."""
    with open_weights(path) as file:
        held = set(file.keys())
        for name in names:
            if name not in held:
                raise BadFolder(f"{path} has no tensor {name}; the index names it: copy both again")
            found, needed = file.get_slice(name), list(expected[name].shape)
            if found.get_shape() != needed or not found.get_dtype().startswith(("F", "BF")):
                raise BadFolder(
                    f"{path}: {name} is {found.get_shape()} of {found.get_dtype()}, its config "
                    f"needs floats {needed}; use the weights of this config"
                )
            yield name, file.get_tensor(name)


class SkipInit(TorchFunctionMode):
    """Skips torch.nn.init, because the file replaces the initial weights.

    On the meta device init has no effect, but torch would import its compiler for it.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))
