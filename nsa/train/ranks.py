"""How many processes train together: in this version, one."""

from __future__ import annotations

from nsa.config.env import read
from nsa.train.errors import RunRefused

AUTO, OFF, ON = -1, 0, 1
"""The values of --ddp: as the launcher says, never, always."""


def require_one_rank(ddp: int) -> None:
    """Raise RunRefused where more than one rank is asked for."""
    world_size = read("WORLD_SIZE")
    if ddp != ON and world_size <= 1:
        return
    given = f"--ddp {ddp} with WORLD_SIZE={world_size}"
    raise RunRefused(
        f"{given}: this version trains in one process, many ranks are not in it yet; start it "
        "without torchrun, with --ddp 0 or -1, and raise train.accumulate_grad_batches instead"
    )
