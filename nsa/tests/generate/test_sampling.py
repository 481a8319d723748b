"""The choice of a token, held to brute force."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import Tensor

from nsa.generate import Sampling, choose_tokens
from nsa.generate.decode import keep_top_k, keep_top_p, penalize


def draws(num: int, seed: int = 0) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed + i) for i in range(num)]


def kept(logits: Tensor) -> set[int]:
    return set(torch.nonzero(logits[0].isfinite()).flatten().tolist())


def test_temperature_zero_takes_the_most_likely_token() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, -1.0, 0.0]])
    assert choose_tokens(logits, Sampling(temperature=0), draws(2)).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(temperature=2.0), [0.0, 0.5, 1.0, 1.5]),
        (Sampling(top_k=2), [-torch.inf, -torch.inf, 2.0, 3.0]),
        (Sampling(top_p=0.8), [-torch.inf, -torch.inf, 2.0, 3.0]),
        (Sampling(temperature=2.0, top_k=3, top_p=0.7), [-torch.inf, -torch.inf, 1.0, 1.5]),
    ],
    ids=["temperature", "top-k", "top-p", "all"],
)
def test_draws_follow_the_distribution_that_is_left(
    sampling: Sampling, expected: list[float]
) -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).expand(20_000, 4)
    tokens = choose_tokens(logits, sampling, [draw] * len(logits))
    seen = torch.bincount(tokens, minlength=4) / len(tokens)
    assert torch.allclose(seen, torch.tensor(expected).softmax(-1), atol=0.015)


@pytest.mark.parametrize("p", [0.01, 0.3, 0.5, 0.75, 0.9, 0.999])
def test_top_p_keeps_the_smallest_set_that_reaches_p(p: float) -> None:
    """Every subset of seven tokens is tried: none with fewer tokens reaches p."""
    for seed in range(20):
        logits = 2 * torch.randn(1, 7, generator=torch.Generator().manual_seed(seed))
        probs = torch.softmax(logits.double(), -1)[0].tolist()
        chosen = kept(keep_top_p(logits, p))
        assert sum(probs[i] for i in chosen) >= p
        for size in range(1, len(chosen)):
            best = max(sum(probs[i] for i in some) for some in combinations(range(7), size))
            assert best < p
        ranked = sorted(range(7), key=lambda i: -probs[i])
        assert chosen == set(ranked[: len(chosen)])


def test_top_p_at_a_tie_keeps_the_lower_ids() -> None:
    assert kept(keep_top_p(torch.zeros(1, 8), 0.5)) == {0, 1, 2, 3}
    assert kept(keep_top_p(torch.zeros(1, 8), 0.51)) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("k", [1, 3, 6, 7, 100])
def test_top_k_keeps_exactly_the_k_largest(k: int) -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 2.0, 2.0, 2.0, 0.0]])
    ranked = sorted(range(7), key=lambda i: (-logits[0, i].item(), i))
    assert kept(keep_top_k(logits, k)) == set(ranked[:k])


def test_penalty_makes_seen_tokens_less_likely_whatever_their_sign() -> None:
    logits = torch.tensor([[2.0, -2.0, 0.0, 3.0, -3.0]])
    seen = torch.tensor([[True, True, True, False, False]])
    assert penalize(logits, seen, 2.0).tolist() == [[1.0, -4.0, 0.0, 3.0, -3.0]]


def test_a_row_depends_on_its_own_logits_and_generator_alone() -> None:
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(5))
    sampling = Sampling(temperature=1.5, top_k=20, top_p=0.95)
    together = choose_tokens(logits, sampling, draws(4)).tolist()
    alone = [choose_tokens(logits[i : i + 1], sampling, draws(4)[i : i + 1]) for i in range(4)]
    assert together == torch.cat(alone).tolist()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(temperature=-0.1), "temperature=-0.1.*must be a finite number >= 0"),
        (dict(temperature=float("nan")), "temperature=nan.*use 0 for the most likely"),
        (dict(temperature=float("inf")), "temperature=inf"),
        (dict(top_k=-1), "top_k=-1.*whole number >= 0"),
        (dict(top_p=0.0), "top_p=0.0.*above 0, at most 1"),
        (dict(top_p=1.1), "top_p=1.1"),
        (dict(repetition_penalty=0.0), "repetition_penalty=0.0.*above 0"),
        (dict(seed=-1), "seed=-1"),
        (dict(seed=1 << 63), "seed=.*2\\^63"),
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)  # type: ignore[arg-type]


def test_logits_that_are_nan_are_an_error_and_not_a_token() -> None:
    with pytest.raises(ValueError, match="logits are NaN.*use fp32"):
        choose_tokens(torch.full((1, 4), torch.nan), Sampling(temperature=0), draws(1))
