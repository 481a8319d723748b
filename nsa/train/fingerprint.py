"""What all ranks of a run must have in common, as text by name."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

import nsa
from nsa.config import Config, to_container
from nsa.config.env import in_effect
from nsa.train.errors import RunRefused
from nsa.train.identity import Identity
from nsa.train.ranks import Fingerprint
from nsa.train.runtime import Runtime


def fingerprint_of_rank(
    cfg: Config, identity: Identity, runtime: Runtime, world_size: int
) -> Fingerprint:
    """The settings, the data, the variables, the code and its libraries of this process."""
    groups = to_container(cfg).items()
    found = {f"{group}.{key}": str(value) for group, keys in groups for key, value in keys.items()}
    found |= {name: value for name, value in in_effect().items() if name.startswith("NSA_")}
    found |= {
        "code": source_hash(),
        "torch": torch.__version__,
        "device": runtime.device.type,
        "world size": str(world_size),
    }
    return found | identity


def refuse_difference(rank: int, theirs: Fingerprint, ours: Fingerprint) -> None:
    """Raise RunRefused where another rank is not like the first."""
    for key in sorted(ours.keys() | theirs.keys()):
        if theirs.get(key) != ours.get(key):
            raise RunRefused(
                f"rank {rank} has {key}={theirs.get(key, 'nothing')}, and rank 0 has "
                f"{ours.get(key, 'nothing')}; all ranks must train the same: start them with one "
                "config, one environment and one version of the code"
            )


def source_hash() -> str:
    """A hash of every module of the package, tests aside; the version alone says too little."""
    root, digest = Path(nsa.__file__).parent, hashlib.sha256(nsa.__version__.encode())
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if name.parts[0] != "tests":
            digest.update(f"\n{name}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
