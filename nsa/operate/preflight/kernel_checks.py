"""Attention on the run's own shapes: kernels match the oracle, and no output sees the future."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.model.cost import block_spec
from nsa.operate.preflight.config_checks import PlannedRun
from nsa.operate.report.evidence import Question
from nsa.operate.report.verdict import Row
from nsa.ops import nsa_attention, sparse_attention
from nsa.train.build import build_model

ORACLE_BYTES = {"cuda": 8 << 30, "cpu": 1 << 29}
"""Memory budget of the oracle, which holds full [S, S] score matrices in float64."""
COPIES = 12
LONGEST = {"cuda": 4096, "cpu": 512}
"""Longest check in tokens: enough for unselected blocks, short enough to finish in seconds."""
ZERO, SCALE_OF_ZERO = 1e-12, 1e-2
"""A tensor whose expected maximum is below ZERO (e.g. dq with a single key) holds only rounding
noise; its error is taken relative to SCALE_OF_ZERO instead."""
Tensors = dict[str, Tensor]


class Errors(NamedTuple):
    """What the kernels of one kind of layer differ by from the oracle."""

    out: float
    grads: float
    other_rows: float
    """Share of the queries that choose other blocks."""


def parity(plan: PlannedRun) -> Row | None:
    """Outputs and gradients of the kernels match the oracle; None: dense attention."""
    model, length = plan.config.model, oracle_length(plan)
    if model.attention_kind == "dense":
        return None
    with _exact_products():
        found = [_branch_errors(plan, length)] if any(model.branched) else []
        found += [_block_errors(plan, length)] if any(model.chosen) else []
    worst = Errors(*(max(column) for column in zip(*found, strict=True)))
    allowed = getattr(plan.limits, f"parity_{plan.runtime.precision}")
    allowed_grad, allowed_rows = max(allowed, plan.limits.parity_grad), plan.limits.parity_rows
    ok = worst.out <= allowed and worst.grads <= allowed_grad and worst.other_rows <= allowed_rows
    asked = Question("kernel parity", f"{allowed:g}, {allowed_grad:g}; {allowed_rows:.2%}")
    return asked.judged(
        ok,
        f"error {worst.out:.1e}, of gradients {worst.grads:.1e}; {worst.other_rows:.2%} of rows "
        "select other blocks",
        evidence=f"{plan.config.runtime.attention_backend} against the oracle, {length} tokens, "
        f"the run's heads and blocks, {plan.runtime.precision}",
        advice="do not train; runtime.backend=torch rules the kernels out; report it",
    )


def _branch_errors(plan: PlannedRun, length: int) -> Errors:
    """Of nsa_attention, given the oracle's selection, and of its own selection."""
    inputs, dout = random_inputs(plan, length)
    backend = plan.config.runtime.attention_backend
    # The oracle runs in fp64 on the inputs already rounded to the run's precision, so that only the
    # kernel's own error is measured.
    wide = {name: x.double() for name, x in inputs.items()}
    selection, expected, expected_grads = _run(plan, wide, dout.double(), "reference")
    # Rounding may select other blocks near ties. So outputs are compared under the oracle's
    # selection, and the kernel's own selection is compared separately.
    own, _, _ = _run(plan, inputs, dout, backend)
    _, out, grads = _run(plan, inputs, dout, backend, selection)
    other_rows = (own != selection).any(dim=-1).double().mean().item()
    return Errors(relative_error(out, expected), _largest(grads, expected_grads), other_rows)


def _block_errors(plan: PlannedRun, length: int) -> Errors:
    """Of sparse_attention, which layers with one K and V run, with blocks drawn at random."""
    inputs, dout = random_inputs(plan, length)
    given = {name[0]: inputs[name] for name in ("q", "k_sel", "v_sel")}
    spec = block_spec(plan.config)
    draw = torch.Generator().manual_seed(1)
    size = (1, length, plan.config.model.n_kv_groups, spec.n_sel)
    index = torch.randint(spec.num_blocks(length), size, generator=draw, dtype=torch.int32)
    index[..., 0] = torch.arange(length)[None, :, None] // spec.l_sel  # the own block is read

    def run(backend: str, dtype: torch.dtype) -> tuple[Tensor, Tensors]:
        leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in given.items()}
        q, k, v = leaves.values()
        ids = index.to(dout.device)
        out = sparse_attention(q, k, v, ids, block=spec.l_sel, backend=backend)
        grads = torch.autograd.grad(out, (q, k, v), dout.to(dtype))
        return out.detach(), dict(zip(leaves, grads, strict=True))

    expected, expected_grads = run("reference", torch.float64)
    out, grads = run(plan.config.runtime.attention_backend, plan.runtime.dtype)
    return Errors(relative_error(out, expected), _largest(grads, expected_grads), 0.0)


def _largest(grads: Tensors, expected: Tensors) -> float:
    return max(relative_error(grads[name], x) for name, x in expected.items())


def causality(plan: PlannedRun) -> Row:
    """Changing later tokens changes no bit of the earlier logits of a model with one layer of each
    rule."""
    asked = Question("causality", "bitwise equal up to every cut")
    small = dataclasses.replace(
        plan.config,
        model=dataclasses.replace(plan.config.model, n_layers=len(plan.config.model.rules)),
        runtime=dataclasses.replace(
            plan.config.runtime, gradient_checkpointing=False, gc_layers="", compile=False
        ),
    )
    vocab, device = plan.config.data.vocab, plan.runtime.device
    length = min(plan.config.train.seq_len, LONGEST[device.type])
    model = build_model(small, vocab, plan.runtime).eval()
    generator = torch.Generator().manual_seed(0)
    ids, other = (torch.randint(vocab, (1, length), generator=generator) for _ in range(2))
    leaks = []
    with torch.no_grad(), plan.runtime.compute():
        before = model(ids.to(device))
        # Cuts at the start, inside and near the end; the tokens after a cut are replaced.
        for t in sorted({0, length // 3, length // 2, length - 2} - {-1}):
            changed = torch.cat([ids[:, : t + 1], other[:, t + 1 :]], dim=1)
            after = model(changed.to(device))
            if not torch.equal(before[:, : t + 1], after[:, : t + 1]):
                leaks.append(t)
    is_finite = bool(before.isfinite().all())
    value = f"tokens after {leaks[0]} change earlier logits" if leaks else "no bit changes"
    return asked.judged(
        not leaks and is_finite,
        value if is_finite else "the output is not finite",
        evidence=f"one layer of the run's model, {length} tokens, {plan.runtime.precision}",
        advice="do not train: the loss would be wrong; run scripts/run_gpu_causality_test.sh "
        "--full",
    )


def oracle_length(plan: PlannedRun) -> int:
    """Longest sequence that fits the oracle's memory budget, at most the run's seq_len."""
    kind = plan.runtime.device.type
    # Bytes per (query, key) pair: 8 per fp64 value, COPIES tensors, all query heads.
    per_pair = 8 * COPIES * plan.config.model.n_heads
    room = math.isqrt(ORACLE_BYTES[kind] // per_pair)
    return max(1, min(plan.config.train.seq_len, LONGEST[kind], room))


def random_inputs(plan: PlannedRun, length: int) -> tuple[Tensors, Tensor]:
    """Random inputs of nsa_attention in the run's precision, and an output gradient."""
    model, spec = plan.config.model, block_spec(plan.config)
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        x = torch.randn(1, *size, generator=generator)
        return x.to(plan.runtime.device, plan.runtime.dtype)

    heads, groups = model.n_heads, model.n_kv_groups
    lengths = {"cmp": spec.num_cmp(length), "sel": length, "win": length}
    tensors = {"q": normal(length, heads, model.d_k)}
    for branch, count in lengths.items():
        tensors[f"k_{branch}"] = normal(count, groups, model.d_k)
        tensors[f"v_{branch}"] = normal(count, groups, model.d_v)
    tensors["gates"] = normal(length, heads, 3).softmax(dim=-1)
    return tensors, normal(length, heads, model.d_v)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Max absolute difference over max expected value; infinite for non-finite input."""
    if expected.numel() == 0:
        return 0.0
    if not bool(actual.isfinite().all()):
        return math.inf
    difference = (actual.double() - expected).abs().max().item()
    scale = expected.abs().max().item()
    return float(difference / (scale if scale > ZERO else SCALE_OF_ZERO))


def _run(
    plan: PlannedRun, inputs: Tensors, dout: Tensor, backend: str, selection: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensors]:
    """Selection, output, and the gradient of every input."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    out, chosen = nsa_attention(
        leaves["q"],
        leaves["k_cmp"],
        leaves["v_cmp"],
        leaves["k_sel"],
        leaves["v_sel"],
        leaves["k_win"],
        leaves["v_win"],
        leaves["gates"],
        block_spec(plan.config),
        backend=backend,
        selection=selection,
        return_selection=True,
    )
    # With few tokens there is no compressed block, so k_cmp and v_cmp may get no gradient.
    grads = torch.autograd.grad(out, list(leaves.values()), dout, allow_unused=True)
    known = zip(leaves, grads, strict=True)
    return chosen, out.detach(), {name: x for name, x in known if x is not None}


@contextmanager
def _exact_products() -> Iterator[None]:
    """Disable TF32, whose rounding would hide an fp32 error."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
