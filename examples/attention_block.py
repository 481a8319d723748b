"""NSA in a transformer block of your own.

Part 1 puts `nsa.NSAAttention` where a block has its attention, and compares one forward and one
backward with the oracle: the same weights with `backend="reference"`, written from the paper's
equations. Part 2 calls the operator on tensors, and shows which blocks the last query read.

    python examples/attention_block.py [--tokens N]
"""

import argparse
from typing import Any

import torch
from torch import Tensor, nn

import nsa

SIZES: dict[str, Any] = dict(l=16, d=8, l_sel=32, n_sel=5, w=64)
"""Tokens, as in nsa.BlockSpec; n_sel counts blocks."""
DIM, HEADS, KV_HEADS, HEAD_DIM = 64, 4, 2, 16


class Block(nn.Module):
    """A pre-norm block: only the attention is special."""

    def __init__(self, backend: str = "auto") -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attn = nsa.NSAAttention(
            DIM, HEADS, KV_HEADS, d_k=HEAD_DIM, d_v=HEAD_DIM, **SIZES, backend=backend
        )
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:  # [B, S, DIM] -> [B, S, DIM]
        x = x + self.attn(self.norm1(x))  # causal, with rotary positions of its own
        return x + self.mlp(self.norm2(x))


def forward_and_backward(block: Block, x: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and all gradients of the weights as one vector."""
    y = block(x)
    grads = torch.autograd.grad(y.square().mean(), list(block.parameters()))
    return y.detach(), torch.cat([grad.flatten() for grad in grads])


def relative_error(value: Tensor, exact: Tensor) -> float:
    return ((value - exact).abs().max() / exact.abs().max()).item()


parser = argparse.ArgumentParser(description="NSA in a transformer block of your own.")
parser.add_argument("--tokens", type=int, default=1024)
args = parser.parse_args()
torch.manual_seed(0)

# --- 1. The module ---

block, oracle = Block(), Block(backend="reference").double()
oracle.load_state_dict(block.state_dict())
x = torch.randn(2, args.tokens, DIM)
y, grads = forward_and_backward(block, x)
y_exact, grads_exact = forward_and_backward(oracle, x.double())
print(f"block: {list(x.shape)} -> {list(y.shape)}, {grads.numel()} gradients")
print(
    f"relative error against the float64 oracle: output {relative_error(y, y_exact):.1e}, ", end=""
)
print(f"gradients {relative_error(grads, grads_exact):.1e}")

# A change of the last token must not reach the tokens before it.
x[:, -1] += 1.0
with torch.no_grad():
    changed = (block(x) - y).abs().amax(dim=(0, 2)).nonzero().flatten()
print(f"after a change of token {args.tokens - 1}, the output differs at {changed.tolist()}")

# --- 2. The operator, with projections of your own ---

spec = nsa.BlockSpec(**SIZES)
q = torch.randn(1, args.tokens, HEADS, HEAD_DIM)
# A key and a value for each branch: compressed, selected, window.
kv = torch.randn(6, 1, args.tokens, KV_HEADS, HEAD_DIM)
gates = torch.randn(1, args.tokens, HEADS, 3).softmax(dim=-1)
k_cmp, v_cmp = nsa.compress(kv[0], spec), nsa.compress(kv[1], spec)
out, selection = nsa.nsa_attention(
    q, k_cmp, v_cmp, kv[2], kv[3], kv[4], kv[5], gates, spec, return_selection=True
)
print(f"operator: {list(out.shape)}, of {spec.num_blocks(args.tokens)} blocks of {spec.l_sel}")
for head in range(KV_HEADS):
    print(f"  the last query of KV head {head} read blocks {selection[0, -1, head].tolist()}")
print(f"  that is {spec.num_reads(args.tokens)} tokens in all branches; dense: {args.tokens}")
