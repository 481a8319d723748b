"""Weights as a safetensors file: a header in JSON, then the raw numbers; nothing in it can run.

The format: 8 bytes with the length of the header (little endian), the header (for every tensor its
dtype, shape and byte range; texts under `__metadata__`), padded with spaces to 8 bytes, the data.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from nsa.telemetry.atomic import replacing

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
ALIGNMENT = 8


def write_safetensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> Path:
    """Write CPU tensors, each whole, in the order of their names."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    names = sorted(tensors)
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in DTYPES:
            allowed = ", ".join(str(dtype) for dtype in DTYPES)
            raise ValueError(f"{name} is {tensor.dtype}; safetensors files here hold {allowed}")
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            flat = tensors[name].detach().cpu().contiguous().flatten()
            file.write(flat.view(torch.uint8).numpy().tobytes())
    return path


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors and the metadata back; refuses a header that does not fit its file."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    if len(content) < 8 or size > len(content) - 8:
        raise ValueError(f"{path} is too short for its header of {size} bytes; it was cut")
    header = json.loads(content[8 : 8 + size])
    metadata = header.pop("__metadata__", {})
    dtypes = {name: dtype for dtype, name in DTYPES.items()}
    tensors = {}
    for name, entry in header.items():
        first, end = entry["data_offsets"]
        if end > len(content) - 8 - size:
            raise ValueError(f"{path} ends before {name}; it was cut")
        data = bytearray(content[8 + size + first : 8 + size + end])
        flat = torch.frombuffer(data, dtype=dtypes[entry["dtype"]]) if data else torch.empty(0)
        tensors[name] = flat.reshape(entry["shape"])
    return tensors, metadata
