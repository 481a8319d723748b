"""Every shape finds tiles that fit the shared memory of every GPU, or another way that is counted.

Kernels are compiled as the package launches them, for GPUs that are not here. The slow test sweeps
over the shapes, to the end; the others take those that come closest to the limits, until their
memory is known.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="Triton exists for Linux only")

from nsa import NSAAttention
from nsa.ops import fallbacks, machine, plan
from nsa.ops.checks import Layout
from nsa.ops.eager.rows import KeyValues
from nsa.ops.spec import BlockSpec
from nsa.ops.triton import attention, launcher, problem
from nsa.ops.triton import tiles as tables
from nsa.ops.triton.attention import attend_continued
from nsa.ops.triton.decode.launch import Caches, Decoder, Token
from nsa.ops.triton.decode.tiles import Workspace, decode_obstacle, decode_tiles
from nsa.ops.triton.operators import nsa_attention
from nsa.ops.triton.replay import calls as replayed
from nsa.tests.support.compiling import (
    MAX_SHARED_BYTES,
    assert_fits,
    compiling_until,
    shared_addresses,
    starting_on,
)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
GPUS = (80, 86, 89, 90, 100, 120)
SMALL = (86, 89, 120)
"""Those with 99 KiB."""


class Shape:
    """Heads of a group, block length and dtype, and calls that launch kernels for them."""

    def __init__(self, d_k: int, d_v: int, group: int = 4, l_sel: int = 64, dtype: str = "bf16"):
        self.d_k, self.d_v, self.group = d_k, d_v, group
        self.spec, self.dtype = BlockSpec(l_sel=l_sel, n_sel=3), DTYPES[dtype]
        self.name = f"{dtype}-{d_k}-{d_v}-G{group}-l_sel{l_sel}"

    def __repr__(self) -> str:
        return self.name

    def zeros(self, *size: int) -> Tensor:
        return torch.zeros(size, dtype=self.dtype)

    def keys(self, *size: int) -> tuple[Tensor, Tensor]:
        """k and v of one KV head."""
        return self.zeros(*size, 1, self.d_k), self.zeros(*size, 1, self.d_v)

    def attend(self, seq_len: int, docs: int = 1) -> None:
        """Forward and backward of whole sequences."""
        lens = [seq_len // docs] * docs
        num_cmp = sum(self.spec.num_cmp(n) for n in lens)
        seq_len = sum(lens)
        pairs = [self.keys(1, n) for n in (num_cmp, seq_len, seq_len)]
        q, gates = (self.zeros(1, seq_len, self.group, n) for n in (self.d_k, 3))
        tensors = [x.requires_grad_() for x in (q, *(x for kv in pairs for x in kv), gates)]
        given: list[Any] = [*tensors, self.spec]
        layout = Layout(lens, lens, 0)
        out, _ = nsa_attention(*given, scale=0.1, layout=layout, selection=None)
        out.backward(torch.zeros_like(out))

    def attend_masked(self) -> None:
        self.attend(300)

    def attend_packed(self) -> None:
        self.attend(300, 2)

    def attend_blocks(self) -> None:
        """Longer than what a query selects, so that the selected branch goes to its blocks."""
        self.attend(6 * self.spec.l_sel + 1)

    def proceed(self) -> None:
        """Chunked prefill: 64 tokens after 64 others."""
        cmp, past = self.keys(1, self.spec.num_cmp(128)), self.keys(1, 128)
        attend_continued(
            self.zeros(1, 64, self.group, self.d_k), cmp, past, past,
            self.zeros(1, 64, self.group, 3), self.spec, 0.1, first=64, win_first=0,
        )  # fmt: skip

    def decode(self, batch: int = 2, max_len: int = 8192) -> None:
        """A step of `batch` sequences."""

        def cache(size: int) -> KeyValues:
            # Nobody touches the memory.
            k, v = (torch.empty(batch, 1, size, d, dtype=self.dtype) for d in (self.d_k, self.d_v))
            return KeyValues(k, v)

        lengths = torch.zeros(batch, dtype=torch.int32)
        reads = torch.zeros(2, batch, 1, 3, dtype=torch.int64)
        sizes = (self.spec.num_cmp(max_len), max_len, min(self.spec.w, max_len), self.spec.l)
        cmp, sel, win, raw = (cache(size) for size in sizes)
        caches = Caches(cmp, sel, win, raw, lengths, None, reads[0], reads[1])
        decoder = Decoder(caches, self.spec, max_len, self.group, 0.1, Workspace())
        k, v = self.keys(batch, 1)
        q = self.zeros(batch, 1, self.group, self.d_k)
        decoder.step(Token(q, [k] * 3, [v] * 3, self.zeros(batch, 1, self.group, 3)))

    def decode_many(self) -> None:
        self.decode(64, 20480)


# --- what is launched ---

CLOSEST: list[tuple[int, Shape, str, tuple[str, ...]]] = [
    # The issue: 120 KB of 99, with the tiles of an H200.
    (120, Shape(192, 128), "attend_masked", ("band_dq",)),
    (120, Shape(128, 128), "attend_masked", ("band_forward", "band_dkv")),
    # A mask with a word for every pair of a query and a key.
    (120, Shape(128, 128), "attend_packed", ("band_forward",)),
    (86, Shape(128, 128), "attend_blocks", ("block_forward", "block_backward")),
    (80, Shape(128, 128, l_sel=128), "attend_blocks", ("block_forward", "block_backward")),
    (100, Shape(192, 128, group=64), "attend_blocks", ("block_backward",)),
    (100, Shape(256, 256), "attend_masked", ("group_scores",)),
    (120, Shape(256, 256, group=64), "decode", ("attend_compressed", "attend_tokens")),
    (120, Shape(64, 64, group=64, l_sel=2048), "decode", ("score_blocks",)),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("capability", "shape", "call", "kernels"),
    CLOSEST,
    ids=[f"sm_{cap}-{shape}-{call}" for cap, shape, call, _ in CLOSEST],
)
def test_what_comes_closest_to_a_gpus_memory_fits(capability, shape, call, kernels):
    with compiling_until("memory"), starting_on(capability, kernels) as started:
        getattr(shape, call)()

    compiled = [one for one in started if one.compiled is not None]
    assert {one.name for one in compiled} == set(kernels)
    for one in compiled:
        assert_fits(one, capability)


@pytest.mark.parametrize("capability", [86, 100, 120])
def test_gpus_of_other_families_get_binaries(capability):
    """Compiled to the end; test_triton_on_cpu.py has sm_80 and sm_90."""
    kernels = ("query_forward", "block_backward")
    with starting_on(capability, kernels) as started:
        Shape(32, 32, group=64).attend_blocks()

    compiled = [one for one in started if one.compiled is not None]
    assert {one.name for one in compiled} == set(kernels)
    for one in compiled:
        assert one.compiled.asm["cubin"]
        assert_fits(one, capability)


SWEPT = [
    Shape(64, 64),
    Shape(64, 64, l_sel=512),
    Shape(128, 128),
    Shape(128, 128, group=64),
    Shape(192, 128, group=64),
    Shape(256, 256, group=16),
    Shape(248, 248, group=64, l_sel=2048),
    Shape(16, 256),
    Shape(64, 64, group=64, dtype="fp32"),
    Shape(128, 128, dtype="fp32"),
    Shape(256, 256, dtype="fp32"),
]
CALLS = ("attend_masked", "attend_packed", "attend_blocks", "proceed", "decode", "decode_many")
LARGE = (
    *("band_forward", "band_dkv", "band_dq", "group_scores", "query_forward", "query_dq"),
    *("block_forward", "block_backward", "attend_compressed", "attend_tokens", "score_blocks"),
)
"""Kernels that take shared memory for tiles; the others pass a few sums through it."""


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
@pytest.mark.parametrize("shape", SWEPT, ids=repr)
def test_every_shape_fits_every_gpu(shape, capability):
    """Minutes each; wide heads in fp32 take the longest."""
    for call in CALLS:
        with starting_on(capability, LARGE) as started:
            getattr(shape, call)()
        compiled = [one for one in started if one.compiled is not None]
        assert compiled
        for one in compiled:
            assert_fits(one, capability)


def assert_no_shared_addresses(shape: Shape, call: str, kernels: tuple[str, ...]) -> None:
    """What ptxas miscompiles on sm_90: operands of two layouts at one address."""
    with compiling_until("ptx"), starting_on(90, kernels) as started:
        getattr(shape, call)()
    compiled = [one for one in started if one.compiled is not None]
    assert compiled
    for one in compiled:
        assert not shared_addresses(one.compiled), (shape, one.name)


@pytest.mark.parametrize("d_k", [40, 72])
def test_heads_in_two_parts_never_share_an_address(d_k):
    """The second part of the queries has a layout of its own."""
    assert_no_shared_addresses(Shape(d_k, 16), "attend_blocks", ("block_forward",))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("d_v", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("call", CALLS)
def test_no_head_shares_an_address(call, d_v):
    """All sums of two powers of two, as parts_of makes them."""
    for d_k in (16, 24, 32, 40, 48, 56, 64, 72, 80, 96, 112, 128, 136, 160, 192, 248, 256):
        for group in (4, 16, 64):
            assert_no_shared_addresses(Shape(d_k, d_v, group=group), call, LARGE)


@pytest.mark.parametrize("capability", [80, 90, 120])
def test_blocks_too_long_for_the_memory_are_read_in_parts(capability):
    """l_sel=1024 at D 64: block_backward would ask for 331 KB, on an H200 128 at D 128 for 189."""
    long, wide = Shape(64, 64, l_sel=1024), Shape(128, 128, l_sel=128)
    for shape, size in ((long, 128), (wide, 64 if capability == 120 else 128)):
        with starting_on(capability, ()) as started:
            shape.attend_blocks()

        assert not [one.name for one in started if one.constants.get("SELECT")]
        read = {
            one.name: one.constants["L_SEL"] for one in started if one.name.startswith("block_")
        }
        assert read == {"block_forward": size, "block_backward": size}


# --- what is compiled ahead ---

AHEAD = {
    "masked": (Shape(64, 64), 300, 1),
    "packed": (Shape(64, 64), 300, 2),
    "by blocks": (Shape(64, 64), 400, 1),
    "by queries": (Shape(128, 128, group=16), 400, 1),
    "no compressed token": (Shape(64, 64), 20, 1),
    "long blocks": (Shape(64, 64, l_sel=256), 4000, 2),
}


CHEAP = {"empty", "empty_strided", "new_empty", "new_zeros", "zeros"}
CHEAP |= {"zero_", "fill_", "_to_copy", "select", "squeeze"}
"""Most other operations on the meta device import sympy: seconds in which nothing compiles."""


class Operations(TorchDispatchMode):
    """The operations within, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape, seq_len, docs", AHEAD.values(), ids=list(AHEAD))
def test_what_is_compiled_ahead_is_what_the_call_launches(shape, seq_len, docs, monkeypatch):
    ahead: list[tuple[str, Any]] = []

    def note(device: int, kernel: Any, arguments: Any, one: launcher.Launch) -> None:
        ahead.append((kernel.__name__, {**one.constants, **one.options}))

    calls: list[Any] = []
    monkeypatch.setattr(launcher, "_compile", note)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(replayed, "_compile_once", lambda *args, **_: calls.append(args))
    indexed: list[Any] = []
    real = problem.index_documents
    monkeypatch.setattr(problem, "index_documents", lambda *a: indexed.append(a) or real(*a))
    with starting_on(90, ()) as started:
        shape.attend(seq_len, docs)
        (called, inputs, selection, backward_too), _ = calls
        made = len(indexed)
        launched = [(one.name, one.constants) for one in started if one.name != "finite_rows"]
        started.clear()
        with Operations() as seen:
            attention.compile_ahead(called, inputs, selection, backward_too=backward_too)

    assert seen.names <= CHEAP and len(indexed) == made, "an index of documents nobody reads"
    assert backward_too and not started and launched
    assert all(one in ahead for one in launched)
    # Other lengths run the same kernels; few have other constants or dtypes there.
    assert {name for name, _ in ahead} <= {name for name, _ in launched} | {"sum_parts"}
    assert len(ahead) <= len(launched) + 8  # equal kernels once


def compiles_ahead() -> bool:
    return getattr(launcher._thread, "ahead", None) is not None


def test_other_threads_launch_while_one_compiles_ahead(monkeypatch):
    monkeypatch.setattr(launcher, "_compile", lambda *_: None)
    with launcher.compiling_ahead(), ThreadPoolExecutor(1) as other:
        assert compiles_ahead()
        assert not other.submit(compiles_ahead).result()
    assert not compiles_ahead()


def test_what_is_added_within_is_compiled_with_the_rest(monkeypatch):
    """`nsa warmup` compiles ahead around calls that do so, too."""
    compiled = []
    monkeypatch.setattr(launcher, "_compile", lambda *args: compiled.append(args[3]))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    launches = [launcher.Launch((1,), (number,), {}, {}) for number in (16, 17, 32)]
    with launcher.compiling_ahead() as outer:
        with launcher.compiling_ahead() as inner:
            inner.add(Kernel, (torch.zeros(16),), launches[0])
        assert compiles_ahead()
        for launch in launches[1:]:
            outer.add(Kernel, (torch.zeros(16),), launch)
    assert sorted(one.numbers[0] for one in compiled) == [16, 17]  # 32 is the same code as 16


class Kernel:
    arg_names = ("p", "S")
    do_not_specialize = ()


def test_one_thread_at_a_time_loads_a_launcher(monkeypatch):
    """Two that did would now and then get each other's (docs/log/faults.md)."""
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    kernel, launch = LoadedKernel(), launcher.Launch((1,), (16,), {}, {})
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: launcher._compile(0, kernel, [], launch), range(3)))
    assert kernel.seen == [1, 1, 1]


class LoadedKernel:
    """Compiled at once; slow to load. `seen`: how many threads did at that time."""

    def __init__(self) -> None:
        self.busy = 0
        self.seen: list[int] = []

    def warmup(self, *_: Any, **__: Any) -> LoadedKernel:
        return self

    @property
    def run(self) -> None:
        self.busy += 1
        time.sleep(0.02)
        self.seen.append(self.busy)
        self.busy -= 1


def test_an_error_of_the_compiler_reaches_the_caller(monkeypatch):
    def fail(*_: Any) -> None:
        raise RuntimeError("ptxas failed")

    monkeypatch.setattr(launcher, "_compile", fail)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    launch = launcher.Launch((1,), (16,), {}, {})
    with pytest.raises(RuntimeError, match="ptxas failed"), launcher.compiling_ahead() as ahead:
        ahead.add(Kernel, (torch.zeros(16),), launch)
    assert not compiles_ahead()


# --- the tables ---


def test_tiles_of_an_h200_are_those_that_were_measured():
    """Making tiles fit changes none where they did: 16-bit heads, up to 64 of them to a group."""
    for d_k in range(8, 257, 8):
        for d_v in {8, 64, 128, 192, 256, d_k}:
            heads = (d_k, d_v, torch.bfloat16)
            for branch in range(3):
                measured = tables._forward_tiles(*heads, branch)
                assert tables.forward_tiles(*heads, branch, (9, 0), words=branch == 1) == measured
            for words in (False, True):
                found = tables.dkv_tiles(*heads, (9, 0), words=words)
                assert found == tables._dkv_tiles(*heads)
                found = tables.dq_tiles(*heads, (9, 0), words=words)
                assert found == tables._dq_tiles(*heads)
            for group in (1, 4, 6, 8, 16, 64):
                sizes = (d_k, d_v, group, BlockSpec(), torch.bfloat16)
                for backward in (False, True):
                    found = tables.query_tiles(*sizes, (9, 0), backward=backward)
                    assert found == tables._query_tiles(*sizes, backward)
                for purpose in ("forward", "backward", "dkv"):
                    if tables.fits_blocks(d_k, d_v, BlockSpec(), torch.bfloat16):
                        found = tables.fitted_block_tiles(*sizes, purpose, (9, 0))
                        assert found == tables.block_tiles(*sizes, purpose)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("capability", [*GPUS, 87, 103, 110, 121, 130])
def test_every_gpu_has_tiles_for_every_head(capability, dtype):
    """Also GPUs that are not known yet, which count as the smallest."""
    gpu = divmod(capability, 10)
    room = MAX_SHARED_BYTES.get(capability, MAX_SHARED_BYTES[120] if capability > 120 else 1 << 30)
    for d_k in (8, 64, 96, 128, 192, 248, 256):
        for d_v in (8, 64, 128, 256):
            heads = (d_k, d_v, DTYPES[dtype])
            for kernel, tiles in (
                ("band_forward", tables.forward_tiles(*heads, 1, gpu, words=True)),
                ("band_dkv", tables.dkv_tiles(*heads, gpu, words=True)),
                ("band_dq", tables.dq_tiles(*heads, gpu, words=True)),
                ("group_scores", tables.score_tiles(d_k, DTYPES[dtype], gpu)),
            ):
                words = kernel != "group_scores"
                assert tables.shared_bytes(kernel, tiles, *heads, gpu, words=words) <= room


def test_decode_tiles_divide_their_parts_on_every_gpu():
    for capability in GPUS:
        for d_k, group, l_sel in ((64, 4, 64), (128, 64, 512), (256, 64, 2048), (192, 16, 48)):
            for dtype in DTYPES.values():
                for segments in (1, 128):
                    spec = BlockSpec(l_sel=l_sel, w=65536)
                    gpu = divmod(capability, 10)
                    if decode_obstacle(d_k, d_k, group, dtype, spec, 65536, gpu):
                        continue
                    found = decode_tiles(
                        *(d_k, d_k, group, dtype, gpu),
                        segments=segments, num_cmp=spec.num_cmp(65536), window=spec.w, spec=spec,
                        whole=False,
                    )  # fmt: skip
                    assert found.CMP_PART % found.BN == 0 == found.WIN_PART % found.TOKENS
                    assert not found.SUMS or found.BN % (l_sel // spec.d) == 0


# --- what the plan says ---

OBSTACLES: dict[str, dict[str, Any]] = {
    "torch is built for ROCm, the kernels are for NVIDIA's GPUs": dict(rocm=True),
    "Triton is 3.4, the kernels need 3.6 or later": dict(triton=(3, 4)),
    "torch is 2.7, the kernels need 2.11 or later": dict(torch=(2, 7)),
    "compute capability 7.5, the kernels need 8.0 or later": dict(capability=(7, 5)),
    "the package triton is not installed": dict(triton=None),
}


@pytest.mark.parametrize("reason", OBSTACLES)
def test_the_plan_refuses_a_machine_that_cannot_run_the_kernels(reason):
    other = machine.Machine("cuda", **({"capability": (9, 0)} | OBSTACLES[reason]))

    auto = plan.plan_attention("cuda", torch.bfloat16, machine=other)

    assert auto.backend == "torch" and reason in auto.reason
    assert auto.fallbacks == (("all", auto.reason),)
    with pytest.raises(ValueError, match=f"backend='triton' cannot run: .*{reason}; use backend="):
        plan.plan_attention("cuda", torch.bfloat16, "triton", machine=other)


def test_versions_are_read_from_what_is_installed():
    assert machine._version("2.11.0+cu130") == (2, 11) == machine._version("2.11.0a0+git1234")
    assert machine._triton_version() >= machine.TRITON_OLDEST
    here = machine.machine_of(torch.device("cpu"))
    assert here.torch >= machine.TORCH_OLDEST and not here.rocm
    assert machine.machine_of(torch.device("cpu")) is here


REFUSED = (120, Shape(256, 256, group=128, dtype="fp32"))
"""128 rows of 256 fp32 numbers are 128 KiB."""


def module_of(shape: Shape, backend: str) -> NSAAttention:
    sizes = (16, shape.group, 1, shape.d_k, shape.d_v)
    return NSAAttention(*sizes, l_sel=shape.spec.l_sel, n_sel=3, backend=backend)


@pytest.fixture
def counted(monkeypatch):
    """Tensors of the CPU count as those of a GPU: only there a fallback is one."""
    monkeypatch.setattr(Tensor, "is_cuda", True)
    fallbacks.reset()
    yield fallbacks.counts
    fallbacks.reset()


def test_decoding_what_does_not_fit_is_counted_or_refused(counted):
    capability, shape = REFUSED
    reason = (
        "128 query heads to a KV head, with Dk=256 and Dv=256 in torch.float32, do not fit the "
        "99 KiB of shared memory of this GPU (sm_120)"
    )
    x = torch.zeros(1, 8, 16)
    with starting_on(capability, ()) as started, torch.no_grad():
        module, named = module_of(shape, "auto"), module_of(shape, "triton")
        cache = module.new_cache(1, 256)
        module.step(x[:, :1], cache)
        module.prefill(x, cache)
        for call, tokens in ((named.step, x[:, :1]), (named.prefill, x)):
            with pytest.raises(ValueError, match="backend='triton' cannot run: 128 query heads"):
                call(tokens, cache)

    assert not [one.name for one in started if one.name.startswith(("attend", "query"))]
    assert counted() == {fallbacks.Fallback(None, "all", reason): 2}


def test_decode_says_what_is_too_long_for_it():
    spec, heads = BlockSpec(), (64, 64, 4, torch.bfloat16)

    assert decode_obstacle(*heads, spec, 16384 * 64, (9, 0)) == ""
    assert "16385 selection blocks, the decode kernels take up to 16384" in decode_obstacle(
        *heads, spec, 16384 * 64 + 1, (9, 0)
    )
    assert "4096 compressed tokens to a selection block (l_sel=4096, d=1)" in decode_obstacle(
        64, 64, 64, torch.bfloat16, BlockSpec(d=1, l_sel=4096), 8192, (9, 0)
    )
