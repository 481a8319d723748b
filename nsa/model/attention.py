"""NSAAttention: projections, positions, compression and gates around the operator.

`forward` is for training and whole sequences, `prefill` and `step` append to a cache. A learned phi
(Eq. 7) turns a block of l raw tokens into one compressed token; it comes first.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from nsa.config.env import read
from nsa.model.cache import DecodedCache, NSACache, cache_dtype, check_one_token
from nsa.model.fused import add_product, is_plain, norm_and_project
from nsa.model.paged import PagedCache, Pages
from nsa.model.rope import (
    LINEAR,
    RMSNorm,
    Rope,
    RopeScaling,
    Rotary,
    apply_rope,
    document_positions,
)
from nsa.model.stats import AttentionStats
from nsa.ops import BlockSpec, compress, nsa_attention
from nsa.ops.checks import check_documents
from nsa.ops.eager.attention import attend_cached, compute_dtype
from nsa.ops.fallbacks import in_layer, record
from nsa.ops.plan import Plan, cannot_run, nvtx, plan_attention, read_switches
from nsa.ops.triton.decode.tiles import decode_obstacle
from nsa.ops.triton.tiles import capability_of, query_obstacle

PHIS = ("avg", "mlp")
"""How a block becomes one compressed token: the mean, or a learned MLP."""


class BlockMLP(nn.Module):
    """The learned phi of keys or of values: a two-layer MLP on a block, shared by the KV heads.

    Its input is the block's l tokens without RoPE, plus a learned encoding of their place in it.
    """

    def __init__(self, spec: BlockSpec, dim: int) -> None:
        super().__init__()
        self.spec = spec
        self.place = nn.Parameter(torch.empty(spec.l, dim))
        self.fc1 = nn.Linear(spec.l * dim, 2 * dim)
        self.fc2 = nn.Linear(2 * dim, dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.place, std=0.02)
        for layer in (self.fc1, self.fc2):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, doc_lens: list[int]) -> Tensor:
        """[B, S, H, D] -> [B, N, H, D]."""
        return torch.cat([self._one_document(doc) for doc in x.split(doc_lens, dim=1)], dim=1)

    def _one_document(self, x: Tensor) -> Tensor:
        if x.shape[1] < self.spec.l:
            return x[:, :0]
        # Overlapping windows of l tokens, stride d; unfold puts the window last.
        blocks = x.unfold(1, self.spec.l, self.spec.d).transpose(-1, -2)  # [B, N, H, l, D]
        hidden = self.fc1((blocks + self.places().to(x.dtype)).flatten(-2))
        return self.fc2(nn.functional.silu(hidden)).to(x.dtype)

    def places(self) -> Tensor:  # [l, D]
        """The encoding of the places in a block."""
        return self.place


# --- The attention layer ---

GATES = ("softmax", "sigmoid")
BRANCHES = ("cmp", "sel", "win")
"""In the order of the gates."""
ALIGNED_COLUMNS = 64
"""Columns of a product of bf16 are filled up to a multiple of so many."""


class NSAAttention(Rotary):
    """Native Sparse Attention with its own projections: [B, S, dim] -> [B, S, dim]."""

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_kv_groups: int,
        d_k: int,
        d_v: int,
        l: int = 32,
        d: int = 16,
        l_sel: int = 64,
        n_sel: int = 16,
        w: int = 512,
        phi: str = "avg",
        gate: str = "softmax",
        *,
        num_first: int = 1,
        num_local: int = 2,
        rope_base: float = 10000.0,
        rope_scale: float = 1.0,
        rope_scaling: RopeScaling = LINEAR,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        backend: str = "auto",
    ) -> None:
        """`qk_norm`: one norm for the queries, and one for the keys of all branches."""
        super().__init__(d_k, rope_base, rope_scale, rope_scaling)
        self.spec = BlockSpec(l, d, l_sel, n_sel, w, num_first, num_local)
        check_sizes(dim, n_heads, n_kv_groups, d_k, d_v, rope_base, rope_scale)
        for name, choice, known in (("phi", phi, PHIS), ("gate", gate, GATES)):
            if choice not in known:
                raise ValueError(f"{name}={choice!r} is not known; use one of {', '.join(known)}")
        self.num_heads, self.num_groups, self.d_v = n_heads, n_kv_groups, d_v
        self.phi, self.gate_kind, self.backend = phi, gate, backend
        # The environment as it is now: no later change reaches this module's own switches.
        self._batched, self._tile = read("NSA_PREFILL_BATCHED"), read("NSA_PREFILL_TILE")
        self._forced_branch, self._nvtx = read("NSA_FORCE_BRANCH"), read_switches().nvtx
        self.qkv = nn.Linear(dim, n_heads * d_k + 3 * n_kv_groups * (d_k + d_v), bias=qkv_bias)
        self.add_head_norms(qk_norm, norm_eps)
        self.gate = nn.Linear(dim, 3 * n_heads)
        self.out = nn.Linear(n_heads * d_v, dim, bias=False)
        if phi == "mlp":
            self.phi_k = BlockMLP(self.spec, d_k)
            self.phi_v = BlockMLP(self.spec, d_v)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Projections at half of unit gain; gate weights 0, so that all branches start equal."""
        nn.init.normal_(self.qkv.weight, std=0.5 * self.qkv.in_features**-0.5)
        nn.init.normal_(self.out.weight, std=0.5 * self.out.in_features**-0.5)
        if self.qkv.bias is not None:
            nn.init.zeros_(self.qkv.bias)
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)

    def forward(
        self,
        x: Tensor,  # [B, S, dim]
        *,
        cu_seqlens: Tensor | None = None,  # [docs + 1] int32
        rope: Rope | None = None,  # tables of all positions; None: computed here
        stats: AttentionStats | None = None,
        layer: int | None = None,  # index of the layer, for stats and fallback counters
    ) -> Tensor:  # [B, S, dim]
        """Attention over whole sequences; packed documents do not see each other."""
        if not self._batched:
            return self._token_by_token(x, cu_seqlens)
        doc_lens = check_documents(cu_seqlens, x.shape[0], x.shape[1], x.device)
        if rope is None:
            rope = self.rope(document_positions(x.shape[1], cu_seqlens, x.device), x.dtype)
        with nvtx("projections+rope", self._nvtx):
            q, k, v, gates = self._project(x, rope)
        k_cmp, v_cmp = self._compress(k[0], v[0], 0, doc_lens, cu_seqlens)
        with in_layer(layer):
            out, selection = nsa_attention(
                q,
                k_cmp,
                v_cmp,
                k[1],
                v[1],
                k[2],
                v[2],
                gates,
                self.spec,
                cu_seqlens=cu_seqlens,
                backend=self.backend,
                return_selection=True,
            )
        if stats is not None:
            block_tokens = self.spec.l_sel
            stats.record(
                layer or 0, gates, selection, block_tokens=block_tokens, cu_seqlens=cu_seqlens
            )
        return self.out(out.flatten(2))

    def new_cache(self, batch: int, max_len: int) -> NSACache:
        """An empty cache for `batch` sequences of at most `max_len` tokens."""
        weight = self.qkv.weight
        return NSACache(
            self.spec,
            batch=batch,
            max_len=max_len,
            num_groups=self.num_groups,
            d_k=self.d_k,
            d_v=self.d_v,
            dtype=cache_dtype(weight),
            device=weight.device,
        )

    def new_paged_cache(self, pages: Pages) -> PagedCache:
        """An empty paged cache; only the decode kernels can read it."""
        weight = self.qkv.weight
        return PagedCache(
            self.spec,
            pages,
            num_groups=self.num_groups,
            d_k=self.d_k,
            d_v=self.d_v,
            dtype=cache_dtype(weight),
            device=weight.device,
        )

    @torch.no_grad()
    def prefill(self, x: Tensor, cache: NSACache) -> Tensor:  # [B, T, dim] -> [B, T, dim]
        """Append T tokens; on a filled cache this is chunked prefill."""
        cache.check(x)
        if not self._batched:
            return torch.cat([self.step(token, cache) for token in x.split(1, dim=1)], dim=1)
        tile = self._tile or x.shape[1]
        return torch.cat([self._prefill_tile(part, cache) for part in x.split(tile, dim=1)], dim=1)

    @torch.no_grad()
    def step(
        self, x: Tensor, cache: NSACache | PagedCache, rope: Rope | None = None
    ) -> Tensor:  # [B, 1, dim] -> [B, 1, dim]
        """Append one token per sequence; reads only the tokens that NSA selects, and counts them.

        `rope` are the tables of the positions; None: computed here.
        """
        rope = self._rope_of_token(x, cache, rope)
        if self.decodes_by_kernels(cache):
            with nvtx("projections+rope", self._nvtx):
                token = self._project_token(self.qkv(x), self.gate(x), rope)
            out = self._decode(*self._in_dtype(cache, *token), cache)
        elif isinstance(cache, PagedCache):
            raise ValueError(
                f"a paged cache on {x.device} with backend={self.backend!r}: only the decode "
                f"kernels read pages, and they do not run ({self._decode_obstacle(cache)}); "
                f"use a CUDA device and backend 'auto' or 'triton', or a cache of new_cache()"
            )
        else:
            # The torch path. With the reference selection the user asked for it: not a fallback.
            plan = self._plan_of(cache)
            if plan.selection == "fast":
                self._count_fallback(x, self._decode_obstacle(cache))
            with nvtx("projections+rope", self._nvtx):
                q, k, v, gates = self._in_dtype(cache, *self._project(x, rope))
            # Store first: the token attends to itself.
            cache.store_raw(k[0], v[0], self._compress)
            cache.store_selected(k[1], v[1])
            cache.store_window(k[2], v[2])
            scale = 1 / math.sqrt(self.d_k)
            out, reads = attend_cached(
                q, cache.branches(), gates, cache.length, self.spec, scale, plan.flags
            )
            cache.length += 1
            cache.last_reads.copy_(reads)
            cache.reads += reads
        return self.out(out.flatten(2))

    @torch.no_grad()
    def add_step(
        self, x: Tensor, norm: RMSNorm, cache: NSACache | PagedCache, rope: Rope | None = None
    ) -> Tensor:  # [B, 1, dim] -> [B, 1, dim]
        if not self.decodes_by_kernels(cache):
            return super().add_step(x, norm, cache, rope)
        rope = self._rope_of_token(x, cache, rope)
        with nvtx("projections+rope", self._nvtx):
            token = self._project_token(*norm_and_project(x, norm, self.qkv, self.gate), rope)
        out = self._decode(*self._in_dtype(cache, *token), cache)
        return add_product(x, self.out, out.flatten(2))

    def _rope_of_token(self, x: Tensor, cache: DecodedCache, rope: Rope | None) -> Rope:
        """The tables of a step, given or not, after its checks."""
        check_one_token(x)
        cache.check(x)
        return rope or self.rope_of_each(cache.lengths, x.dtype)

    def decodes_by_kernels(self, cache: DecodedCache) -> bool:
        """Whether decode steps with this cache run on the Triton kernels."""
        return not self._decode_obstacle(cache)

    def _decode_obstacle(self, cache: DecodedCache) -> str:
        """Why the decode kernels do not run; empty when they do. backend="triton" raises."""
        plan = self._plan_of(cache)
        if plan.backend != "triton":
            return plan.reason
        if plan.selection != "fast":
            return "NSA_SEL_RANGES_V2=0 asks for the reference selection"
        sizes = (self.d_k, self.d_v, self.num_heads // self.num_groups, cache.dtype)
        obstacle = decode_obstacle(*sizes, self.spec, cache.max_len, capability_of(cache.device))
        return self._raise_if_named(obstacle)

    def _continue_obstacle(self, cache: DecodedCache) -> str:
        """Why chunked prefill cannot run on the Triton kernels; empty when it can."""
        plan = self._plan_of(cache)
        if plan.backend != "triton":
            return plan.reason
        per_group = self.num_heads // self.num_groups
        sizes = (self.d_k, self.d_v, per_group, self.spec, cache.dtype)
        return self._raise_if_named(query_obstacle(*sizes, capability_of(cache.device)))

    def _raise_if_named(self, obstacle: str) -> str:
        """The obstacle, or an error if the caller named the Triton backend."""
        if obstacle and self.backend == "triton":
            raise cannot_run(obstacle)
        return obstacle

    def _count_fallback(self, like: Tensor, obstacle: str) -> None:
        """Count a fallback from the kernels, where `auto` on a GPU would have run them."""
        if like.is_cuda and self.backend == "auto":
            record("all", obstacle)

    def _plan_of(self, cache: DecodedCache) -> Plan:
        return plan_attention(cache.device, cache.dtype, self.backend, (self.d_k, self.d_v))

    def _decode(
        self,
        q: Tensor,
        k: tuple[Tensor, ...],
        v: tuple[Tensor, ...],
        gates: Tensor,
        cache: DecodedCache,
    ) -> Tensor:  # [B, 1, Hq, Dv]
        """A step on the decode kernels. Lengths are read only on the device, so that a CUDA graph
        can capture the step."""
        from nsa.ops.triton.decode.launch import Token

        made = None
        # The learned phi runs in every step, on the latest l tokens. The kernel uses its result
        # only where a block ends; to decide that here, the host would need the length.
        if self.phi == "mlp":
            k_block, v_block = cache.block_ending_here(k[0], v[0])
            start = (cache.lengths + 1 - self.spec.l).clamp(min=0)
            rope = self.rope_of_each(start, q.dtype)
            doc_lens = [self.spec.l]
            made = apply_rope(self.phi_k(k_block, doc_lens), rope), self.phi_v(v_block, doc_lens)
        out = cache.decoder(self.num_heads).step(Token(q, k, v, gates, made))
        cache.advanced()
        return out

    def _prefill_tile(self, x: Tensor, cache: NSACache) -> Tensor:
        if x.shape[1] == 1:
            return self.step(x, cache)
        first, num_tokens = cache.length, x.shape[1]
        with nvtx("projections+rope", self._nvtx):
            projected = self._project(x, self._rope_from(first, num_tokens, x))
            q, k, v, gates = self._in_dtype(cache, *projected)
        # Raw and selected tokens are stored before attention, which reads the cache. The
        # window's are stored after it: the ring would lose tokens that early queries still see.
        cache.store_raw(k[0], v[0], self._compress)
        cache.store_selected(k[1], v[1])
        obstacle = self._continue_obstacle(cache)
        if not obstacle:
            out = self._continue(q, (k[2], v[2]), gates, cache)
            cache.store_window(k[2], v[2])
        else:
            self._count_fallback(q, obstacle)
            branches = cache.branches_with_window(k[2], v[2], compute_dtype(q.dtype))
            cache.store_window(k[2], v[2])
            scale, flags = 1 / math.sqrt(self.d_k), self._plan_of(cache).flags
            out, _ = attend_cached(q, branches, gates, first, self.spec, scale, flags)
        cache.length += num_tokens
        return self.out(out.flatten(2))

    def _continue(
        self, q: Tensor, window: tuple[Tensor, Tensor], gates: Tensor, cache: NSACache
    ) -> Tensor:  # [B, T, Hq, Dv]
        """Attention of T new tokens on Triton; the window's keys and values are not stored yet."""
        from nsa.ops.triton.attention import attend_continued  # Triton exists for Linux only

        first, stop = cache.length, cache.length + q.shape[1]
        num_cmp = self.spec.num_cmp(stop)
        cmp_k, cmp_v, sel_k, sel_v = (
            x[:, :, :length].transpose(1, 2)
            for kv, length in ((cache.cmp, num_cmp), (cache.sel, stop))
            for x in (kv.k, kv.v)
        )
        # An empty cache: an ordinary forward pass.
        if first == 0:
            streams = (cmp_k, cmp_v, sel_k, sel_v, *window)
            return nsa_attention(q, *streams, gates, self.spec, backend=self.backend)
        win_k, win_v, win_first = cache.window_with(*window)
        return attend_continued(
            *(q, (cmp_k, cmp_v), (sel_k, sel_v), (win_k, win_v), gates, self.spec),
            1 / math.sqrt(self.d_k),
            first=first,
            win_first=win_first,
            flags=self._plan_of(cache).flags,
        )

    def _token_by_token(self, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """NSA_PREFILL_BATCHED=0, a slow cross-check: every token through a decode step."""
        if torch.is_grad_enabled() and (x.requires_grad or self.qkv.weight.requires_grad):
            raise ValueError(
                "NSA_PREFILL_BATCHED=0 steps through the decode path, which has no gradient; "
                "unset it to train, or run under torch.no_grad()"
            )
        doc_lens = check_documents(cu_seqlens, x.shape[0], x.shape[1], x.device)
        outs = []
        for document in x.split(doc_lens, dim=1):
            cache = self.new_cache(x.shape[0], document.shape[1])
            outs += [self.step(token, cache) for token in document.split(1, dim=1)]
        return torch.cat(outs, dim=1)

    def _project(
        self, x: Tensor, rope: Rope
    ) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
        """q [B, S, Hq, Dk], k and v of cmp, sel, win [B, S, Hkv, D], gates [B, S, Hq, 3].

        One matrix product; its columns are q, k_sel, k_win, k_cmp, then v_cmp, v_sel, v_win:
        everything to be rotated is contiguous. k_cmp is last: a learned phi rotates it later.
        """
        if self._is_joined() and self._splits_by_kernel(x, rope):
            return self._split_product(self._joined_product(x), rope)
        qkv, logits = self._products(x)
        heads, values = self._heads(qkv)
        rotated = apply_rope(heads[:, :, : self._num_rotated], rope)
        if self._num_rotated < heads.shape[2]:
            rotated = torch.cat([rotated, heads[:, :, self._num_rotated :]], dim=2)
        return *self._split(rotated, values), self._gates(logits, heads.dtype)

    def _products(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Columns of qkv and of gate [B, S, 3 Hq]; compiled, by one product."""
        if not self._is_joined():
            return self.qkv(x), self.gate(x)
        product, sizes = self._joined_product(x), [self.qkv.out_features, self.gate.out_features]
        qkv, logits, _ = product.split([*sizes, product.shape[2] - sum(sizes)], dim=-1)
        if self.qkv.bias is not None:
            qkv = qkv + self.qkv.bias.to(qkv.dtype)
        return qkv, logits + self.gate.bias

    def _is_joined(self) -> bool:
        """Whether qkv and the gates are one product.

        The gates have few columns: their product, and the two of its gradients, take a GPU as long
        as many columns would. A compiler joins the weights while it rounds them.
        """
        return torch.compiler.is_compiling() and is_plain(self.qkv) and is_plain(self.gate)

    def _joined_product(self, x: Tensor) -> Tensor:
        """Columns of qkv, of gate, and zeros; no bias."""
        weight = self.qkv.weight
        # Rows stay aligned: kernels read them where they lie.
        more = -(self.qkv.out_features + self.gate.out_features) % ALIGNED_COLUMNS
        rows = [weight, self.gate.weight, weight.new_zeros(more, weight.shape[1])]
        return nn.functional.linear(x, torch.cat(rows))

    def _splits_by_kernel(self, x: Tensor, rope: Rope) -> bool:
        """Whether a kernel makes heads and gates of the columns of one product."""
        from nsa.ops import traced  # only under a compiler

        if self.phi != "avg" or self.qk_norm or self.qkv.bias is not None or self._forced_branch:
            return False
        dims = (self.d_k, self.d_v)
        runs = traced.plan_compression(x.device, x.dtype, self.backend, dims)
        return runs == "triton" and rope.cos.dim() == 2

    def _split_product(
        self, product: Tensor, rope: Rope
    ) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
        from nsa.ops.triton import heads  # Triton exists for Linux only

        sizes = (self.num_heads, self.num_groups, self.d_k, self.d_v, self.gate_kind == "softmax")
        streams = heads.split(product, *rope, self.gate.bias, *sizes)
        q, k_sel, k_win, k_cmp, v_cmp, v_sel, v_win, gates = streams
        return q, (k_cmp, k_sel, k_win), (v_cmp, v_sel, v_win), gates

    def _project_token(
        self,
        qkv: Tensor,  # [B, 1, columns of self.qkv]
        logits: Tensor,  # [B, 1, 3 Hq]
        rope: Rope,
    ) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
        """The same for one token: RoPE and gates in a single kernel."""
        from nsa.ops.triton.rope_and_gate import rotate_and_gate  # Triton exists for Linux only

        heads, values = self._heads(qkv)
        softmax = self.gate_kind == "softmax"
        rotated, gates = rotate_and_gate(heads, rope, logits, self._num_rotated, softmax=softmax)
        if self._forced_branch:
            gates = self._gates(logits, heads.dtype)
        return *self._split(rotated, values), gates

    def _in_dtype(
        self,
        cache: DecodedCache,
        q: Tensor,
        k: tuple[Tensor, ...],
        v: tuple[Tensor, ...],
        gates: Tensor,
    ) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
        """The projections in the dtype of the cache, in which attention is computed."""
        if q.dtype == cache.dtype:
            return q, k, v, gates
        q, *kv, gates = cache.in_dtype(self.qkv.weight, q, *k, *v, gates)
        return q, tuple(kv[: len(k)]), tuple(kv[len(k) :]), gates

    @property
    def _num_rotated(self) -> int:
        """Heads to be rotated. The learned phi takes unrotated keys; its output is rotated."""
        return self.num_heads + (2 if self.phi == "mlp" else 3) * self.num_groups

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """All queries and keys [B, S, Hq + 3 Hkv, Dk], normed, and all values [B, S, 3 Hkv Dv]."""
        num_keys = self.num_heads + 3 * self.num_groups
        heads, values = qkv.split([num_keys * self.d_k, 3 * self.num_groups * self.d_v], dim=-1)
        return self.norm_heads(heads.unflatten(-1, (num_keys, self.d_k)), self.num_heads), values

    def _split(
        self, heads: Tensor, values: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """q, and k and v of cmp, sel, win."""
        sizes = [self.num_heads] + 3 * [self.num_groups]
        q, k_sel, k_win, k_cmp = heads.split(sizes, dim=2)
        v = values.unflatten(-1, (3, self.num_groups, self.d_v)).unbind(dim=2)
        return q, (k_cmp, k_sel, k_win), v

    def _gates(self, logits: Tensor, dtype: torch.dtype) -> Tensor:  # [B, S, 3 Hq] -> ...
        """Weights of cmp, sel, win: [B, S, Hq, 3], fp32 for bf16 and q's dtype otherwise."""
        logits = logits.unflatten(-1, (self.num_heads, 3))
        logits = logits.to(compute_dtype(logits.dtype))
        gates = logits.softmax(dim=-1) if self.gate_kind == "softmax" else logits.sigmoid()
        if self._forced_branch:  # ablation: one branch alone, whatever the gates say
            gates = torch.zeros_like(gates)
            gates[..., BRANCHES.index(self._forced_branch)] = 1.0
        return gates if dtype == torch.bfloat16 else gates.to(dtype)

    def _compress(
        self,
        k: Tensor,  # [B, S, Hkv, Dk]
        v: Tensor,  # [B, S, Hkv, Dv]
        first_block: int,
        doc_lens: list[int] | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # [B, N, Hkv, Dk], [B, N, Hkv, Dv]
        """Apply phi to raw tokens that start at block `first_block` of their sequence."""
        if self.phi == "avg":
            mean = partial(compress, spec=self.spec, cu_seqlens=cu_seqlens, backend=self.backend)
            return mean(k), mean(v)
        doc_lens = [k.shape[1]] if doc_lens is None else doc_lens
        # A compressed key gets the position of its block's first token.
        starts = [
            (first_block + torch.arange(self.spec.num_cmp(length), device=k.device)) * self.spec.d
            for length in doc_lens
        ]
        rope = self.rope(torch.cat(starts), k.dtype)
        return apply_rope(self.phi_k(k, doc_lens), rope), self.phi_v(v, doc_lens)

    def _rope_from(self, first: int, num_tokens: int, x: Tensor) -> Rope:
        return self.rope(document_positions(num_tokens, None, x.device, first), x.dtype)


def check_sizes(
    dim: int,
    n_heads: int,
    n_kv_groups: int,
    d_k: int,
    d_v: int,
    rope_base: float,
    rope_scale: float,
) -> None:
    """Refuse heads and positions that no attention can have."""
    sizes = {"dim": dim, "n_heads": n_heads, "n_kv_groups": n_kv_groups, "d_k": d_k, "d_v": d_v}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name}={value}; give a positive size")
    if n_heads % n_kv_groups:
        raise ValueError(
            f"n_heads={n_heads} is not a multiple of n_kv_groups={n_kv_groups}; every KV head "
            f"needs the same number of query heads"
        )
    if d_k % 2:
        raise ValueError(f"d_k={d_k} is odd; rotary positions need pairs: use an even d_k")
    for name, number in (("rope_base", rope_base), ("rope_scale", rope_scale)):
        if not number > 0:
            raise ValueError(f"{name}={number}; give a positive number")
