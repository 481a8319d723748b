"""Which blocks the queries read: clustered ones made here, or ones recorded from a model.

A recorded selection is a .npz file with three arrays:
    version    int64 []                     1
    spec       int64 [5]                    l, d, l_sel, n_sel, w
    selection  int32 [B, S, Hkv, n_sel]     block ids ascending, then -1
`nsa.nsa_attention(..., return_selection=True)` gives such a selection of unpacked sequences, and
`write_selection` records it. Of a whole model (studies/nsa_vs_dense), B counts the layers, all of
one sequence. Every row must name blocks 0, c-1 and c, where c = t // l_sel is the
query's own, and in all min(n_sel, c + 1) blocks.
"""

from __future__ import annotations

import lzma
import os
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import nsa
from bench.attention.cases import Case

VERSION = 1
TILE = 64
"""Neighbouring queries that share their blocks in a clustered selection."""


def write_selection(
    path: str | Path,
    selection: Tensor,  # [B, S, Hkv, n_sel] int32
    spec: nsa.BlockSpec,
) -> None:
    """Record a selection; the file appears under its name when it is complete."""
    ids = selection.detach().cpu().numpy()
    check_selection(ids, spec, "selection")
    sizes = np.array(spec.to_ints())
    arrays = {"version": np.int64(VERSION), "spec": sizes, "selection": ids}
    unfinished = Path(f"{path}.tmp")
    # Not np.savez_compressed: LZMA halves what deflate leaves, and np.load reads both.
    with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_LZMA) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asarray(array), allow_pickle=False)
    os.replace(unfinished, path)


def read_selection(path: str | Path) -> tuple[Tensor, nsa.BlockSpec]:
    """Read what `write_selection` wrote; refuses any other file and any illegal row."""
    arrays = _load(path)
    missing = {"version", "spec", "selection"} - set(arrays)
    if missing:
        raise ValueError(
            f"{path} has {sorted(arrays)} but not {sorted(missing)}; record the file with "
            f"write_selection of bench/attention/selections.py"
        )
    version, sizes, ids = arrays["version"], arrays["spec"], arrays["selection"]
    if version.shape != () or version != VERSION:
        raise ValueError(
            f"{path} has version {version.tolist()}; this reader knows {VERSION}: record it again"
        )
    if sizes.shape not in ((5,), (7,)) or sizes.dtype.kind != "i":  # older files force 1 and 2
        raise ValueError(
            f"{path} has spec {sizes.tolist()}; it must be the integers l, d, l_sel, n_sel, w, "
            f"num_first, num_local: record it with write_selection of bench/attention/selections.py"
        )
    spec = nsa.BlockSpec(*sizes.tolist())
    check_selection(ids, spec, str(path))
    return torch.from_numpy(ids), spec


def check_selection(ids: NDArray[np.int32], spec: nsa.BlockSpec, name: str) -> None:
    """Refuse an array that is not a legal selection of `spec`."""
    if ids.dtype != np.int32 or ids.ndim != 4 or ids.shape[-1] != spec.n_sel:
        raise ValueError(
            f"{name} is {ids.dtype} {list(ids.shape)}; int32 [B, S, Hkv, {spec.n_sel}] is "
            f"needed: give what nsa_attention returns with return_selection=True"
        )
    current = (np.arange(ids.shape[1]) // spec.l_sel)[:, None]  # [S, 1]
    count = np.minimum(current + 1, spec.n_sel)
    place = np.arange(spec.n_sel)[None, :]
    wrong = np.where(place < count, ids.swapaxes(1, 2) < 0, ids.swapaxes(1, 2) != -1)
    follows = ids[..., 1:] > ids[..., :-1]
    wrong[..., 1:] |= (place[:, 1:] < count) & ~follows.swapaxes(1, 2)
    # In ascending order the forced blocks have fixed places: first, last but one, last.
    for at, block in ((0, 0), (count - 2, current - 1), (count - 1, current)):
        wrong |= (place == at) & (ids.swapaxes(1, 2) != block)
    if wrong.any():
        b, g, t, _ = np.argwhere(wrong)[0].tolist()
        raise ValueError(
            f"{name} has {ids[b, t, g].tolist()} at (b, t, group) ({b}, {t}, {g}); allowed are "
            f"{int(count[t, 0])} blocks of 0..{int(current[t, 0])}, ascending, with the first, the "
            f"previous and the current one, then -1: record it from the model again"
        )


def recorded(
    selection: Tensor,  # [B, S, Hkv, n_sel] int32
    case: Case,
) -> Tensor:  # [batch, length, Hkv, n_sel] int32
    """The part of a recorded selection that a case needs: its first sequences and tokens."""
    batch, length, num_groups, _ = selection.shape
    if case.batch > batch or case.length > length or case.shape.Hkv != num_groups:
        raise ValueError(
            f"the recorded selection has B={batch}, S={length}, Hkv={num_groups}, the run asks "
            f"for B={case.batch}, S={case.length}, Hkv={case.shape.Hkv}; B and S may be smaller, "
            f"Hkv must be the same: change --batch, --lengths or --shape"
        )
    return selection[: case.batch, : case.length].contiguous()


def clustered(case: Case, spec: nsa.BlockSpec, seed: int = 0) -> Tensor:  # [B, S, Hkv, n_sel] int32
    """Every TILE neighbouring queries pick the same random blocks beside the forced ones."""
    starts = sorted({*range(0, case.length, TILE), *range(0, case.length, spec.l_sel)})
    first = torch.tensor(starts)
    current = (first // spec.l_sel)[:, None, None]  # one for all queries of a run
    num_tiles, num_blocks = -(-case.length // TILE), spec.num_blocks(case.length)
    generator = torch.Generator().manual_seed(seed)
    size = (case.batch, num_tiles, case.shape.Hkv, num_blocks)
    score = torch.rand(size, generator=generator)[:, first // TILE]  # [B, runs, Hkv, blocks]
    block = torch.arange(num_blocks)
    forced = (block == 0) | (block >= current - 1)
    score = score.masked_fill(forced, 2.0).masked_fill(block > current, -1.0)
    best, ids = score.topk(min(spec.n_sel, num_blocks), dim=-1)
    ids = ids.masked_fill(best < 0, num_blocks).sort(dim=-1).values
    ids = ids.masked_fill(ids == num_blocks, -1).to(torch.int32)
    ids = torch.nn.functional.pad(ids, (0, spec.n_sel - ids.shape[-1]), value=-1)
    lengths = torch.tensor([*starts[1:], case.length]) - first
    return ids.repeat_interleave(lengths, dim=1)


def _load(path: str | Path) -> dict[str, NDArray[np.int32]]:
    try:
        with Path(path).open("rb") as stream:  # numpy leaves a torn file open
            arrays = np.load(stream, allow_pickle=False)
            if not isinstance(arrays, np.lib.npyio.NpzFile):
                raise ValueError("it holds a single array")
            return dict(arrays)
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error, lzma.LZMAError) as error:
        raise ValueError(
            f"{path} cannot be read as a .npz file ({error}); record one with write_selection of "
            f"bench/attention/selections.py"
        ) from error
