"""Ranks that share rows (runtime.cp) and matrices (runtime.tp): they learn as one process does, and
resume with other degrees.
"""

from __future__ import annotations

import json
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from nsa.config import ConfigError, RuntimeConfig
from nsa.model import TinyLM
from nsa.parallel import ContextParallel
from nsa.records import VAL, ValRow, read_metrics, read_rows
from nsa.tests.distributed.test_fsdp import equal
from nsa.tests.distributed.test_ranks import PLAIN, alone, config, losses, train
from nsa.tests.support.nursery import Nursery
from nsa.train import build
from nsa.train.checkpoint import find
from nsa.train.distributed.mesh import agree_on_mesh, check_degrees, require_collectives
from nsa.train.distributed.strategy import OFF
from nsa.train.errors import RunRefused

pytestmark = pytest.mark.dist

RUN = (
    *("train.steps=20", "train.save_every=18", "train.eval_every=18", "train.grad_clip=0.5"),
    *("model.n_layers=1", "model.n_kv_groups=2", "data.respect_documents=true"),
)
CLOSE = 1e-6
"""Relative, over twenty updates: the order of sums is all that differs."""
MESHES = {
    "cp": (2, ("train.batch_size=4", "runtime.cp=2")),
    "fsdp and cp": (4, ("train.batch_size=2", "runtime.cp=2", "runtime.strategy=fsdp")),
    "cp and tp": (4, ("train.batch_size=4", "runtime.cp=2", "runtime.tp=2")),
}
"""Ranks and settings: each reads four rows in an update."""


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty updates of four rows in one process."""
    folder = tmp_path_factory.mktemp("one") / "run"
    alone(config(folder, *RUN, "train.batch_size=4"))
    return folder


@pytest.fixture(scope="module")
def runs(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same updates by ranks of each mesh."""
    place, made = tmp_path_factory.mktemp("meshes"), {}
    for name, (ranks, settings) in MESHES.items():
        codes, printed = train(nursery, place / name, *RUN, *settings, ranks=ranks, **PLAIN)
        assert codes == [0] * ranks, printed
        assert "tensor/_redistribute" not in printed
        made[name] = place / name / "run"
    return made


def maps(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "selection.jsonl").read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "ts"} for line in lines]


@pytest.mark.parametrize("name", MESHES)
def test_ranks_that_share_rows_learn_and_report_what_one_process_does(
    name: str, runs: dict[str, Path], one: Path
) -> None:
    found, metrics, expected = runs[name], read_metrics(runs[name]), read_metrics(one)
    assert losses(found) == pytest.approx(losses(one), rel=CLOSE)
    evaluations = [[row.loss for row in read_rows(ValRow, f / VAL)] for f in (found, one)]
    assert evaluations[0] == pytest.approx(evaluations[1], rel=CLOSE)
    assert metrics.val_bits_per_byte == pytest.approx(expected.val_bits_per_byte, rel=CLOSE)
    assert metrics.world_size == MESHES[name][0]
    assert (metrics.batch_global, metrics.tokens_per_step) == (4, expected.tokens_per_step)
    assert metrics.num_params == expected.num_params
    if name != "fsdp and cp":  # with two batches, statistics are of the first
        for key, value in expected.attention_stats.items():
            assert metrics.attention_stats[key] == pytest.approx(value, rel=1e-5), key
        assert maps(found) == maps(one)


RESUMED = {
    "cp": ("cp", "cp"),
    "cp and tp": ("cp and tp", "cp and tp"),
    "tp, from a file": ("cp", "tp"),
    "tp, from other shards": ("fsdp and cp", "tp"),
}
DEGREES = MESHES | {"tp": (2, ("train.batch_size=4", "runtime.tp=2"))}


@pytest.mark.parametrize(("before", "after"), RESUMED.values(), ids=RESUMED)
def test_a_checkpoint_goes_on_with_any_degrees(
    before: str, after: str, runs: dict[str, Path], nursery: Nursery, tmp_path: Path
) -> None:
    """Bit for bit with the same ones."""
    (path,) = [p for p in find.paths_of(runs[before]) if find.step_of(p) == 18]
    ranks, settings = DEGREES[after]
    given: Any = {"flags": ("--resume", path), "ranks": ranks, **PLAIN}
    codes, printed = train(nursery, tmp_path / "a", *RUN, *settings, **given)
    assert codes == [0] * ranks, printed
    found, expected = losses(tmp_path / "a" / "run"), losses(runs[before])
    assert found == pytest.approx({s: expected[s] for s in (19, 20)}, rel=CLOSE)
    if before == after:
        assert equal(tmp_path / "a" / "run", runs[before])


@pytest.mark.parametrize("name", ["cp", "cp and tp"])
def test_one_process_goes_on_alone(
    name: str, runs: dict[str, Path], one: Path, tmp_path: Path
) -> None:
    (path,) = [p for p in find.paths_of(runs[name]) if find.step_of(p) == 18]
    alone(config(tmp_path / "run", *RUN, "train.batch_size=4"), resume=str(path))
    expected = {step: loss for step, loss in losses(one).items() if step > 18}
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=CLOSE)


def test_a_compiled_layer_exchanges_outside_of_its_graph_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor cannot compile what is between the exchanges there."""
    monkeypatch.setattr(build, "BACKEND", "eager")  # nothing is compiled here
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")  # type: ignore[arg-type]
        model = TinyLM.from_config(config(tmp_path), 256)
        parallelize_module(model, mesh, ContextParallel())
        assert model.layers[0].attn.is_one_graph
        build.compile_blocks(model, torch.device("cpu"))
        assert not any(block.attn.is_one_graph for block in model.layers)
    finally:
        dist.destroy_process_group()


# --- what is refused ---


def test_ranks_that_cannot_be_divided_are_refused(tmp_path: Path) -> None:
    degrees = RuntimeConfig(cp=2, tp=2, device="cpu")
    check_degrees(degrees, 8)
    with pytest.raises(ConfigError, match="cp=2 x runtime.tp=2 on 6 ranks.*a multiple of 4; use"):
        check_degrees(degrees, 6)
    with pytest.raises(ConfigError, match="on 1 rank: 2 share.*nproc_per_node=2"):
        alone(config(tmp_path, "runtime.cp=2"))
    with pytest.raises(ConfigError, match="on 1 rank: 2 share"):
        alone(config(tmp_path, "runtime.cp=2"), ddp=OFF)


def test_ranks_with_other_degrees_refuse_together() -> None:
    store, said = HashStore(), dict[int, str]()

    def start(rank: int) -> None:
        try:
            agree_on_mesh(store, rank, 3, RuntimeConfig(cp=1 + rank // 2, device="cpu"))
        except RunRefused as error:
            said[rank] = str(error)

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(said) == 3 and len({*said.values()}) == 1
    assert said[0].startswith("rank 2 has runtime.strategy=auto, runtime.cp=2, runtime.tp=1, but")


def test_a_backend_without_the_collectives_is_refused() -> None:
    """gloo for GPUs alone has none on a CPU."""
    for backend, refused in (("cpu:gloo", False), ("cuda:gloo", True)):
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        try:
            mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")  # type: ignore[arg-type]
            with (
                pytest.raises(ConfigError, match="cuda:gloo, which lacks .* use nccl on GPUs")
                if refused
                else nullcontext()
            ):
                require_collectives(mesh)
        finally:
            dist.destroy_process_group()


REFUSED = {
    "another mesh": (("runtime.cp=2",), "runtime.cp=1", 3, "rank 1 has runtime.strategy=auto"),
    "odd matrices": (("runtime.tp=2", "model.mlp_dim=33"), "", 2, "mlp_dim=33 cannot be divided"),
    "compiled": (("runtime.tp=2", "runtime.compile=true"), "", 2, "runtime.compile=true under"),
}


@pytest.mark.parametrize("settings", REFUSED.values(), ids=REFUSED)
def test_all_ranks_refuse_before_the_first_step(
    settings: tuple[tuple[str, ...], str, int, str], nursery: Nursery, tmp_path: Path
) -> None:
    given, trouble, code, said = settings
    codes, printed = train(nursery, tmp_path / "a", "model.n_kv_groups=2", *given, trouble=trouble)
    assert codes == [code, code] and said in printed, printed
    assert "step 0001" not in printed and "Traceback" not in printed
