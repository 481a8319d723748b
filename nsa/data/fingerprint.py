"""One way to hash what decides some data, so that other data is recognised."""

from __future__ import annotations

import hashlib
import json


def fingerprint_of(**parts: str | int) -> str:
    """Return the sha256 of named parts; neither their order nor their borders are ambiguous."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()
