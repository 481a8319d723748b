"""Sampling, and generation through prefill and the decode cache."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from nsa.config import Config
from nsa.data import ByteTokenizer
from nsa.generate import generate, sample_text, sample_token
from nsa.generate.decode import PROMPT, SAMPLE_TOKENS
from nsa.model import TinyLM


@pytest.fixture
def model(tiny_config: Callable[..., Config]) -> TinyLM:
    """An untrained model whose logits differ enough to make greedy choices clear."""
    torch.manual_seed(0)
    model = TinyLM.from_config(tiny_config(), vocab=256)
    torch.nn.init.normal_(model.embed.weight)
    assert model.lm_head is not None
    torch.nn.init.normal_(model.lm_head.weight)
    return model


def test_temperature_zero_takes_the_most_likely_token() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, -1.0, 0.0]])
    assert sample_token(logits, temperature=0).tolist() == [1, 0]


def test_draws_follow_the_distribution_at_the_temperature() -> None:
    draws = torch.Generator().manual_seed(0)
    logits = torch.tensor([[0.0, 1.0, 2.0]]).expand(20_000, 3)
    tokens = sample_token(logits, temperature=2.0, generator=draws)
    seen = torch.bincount(tokens, minlength=3) / len(tokens)
    expected = torch.softmax(torch.tensor([0.0, 0.5, 1.0]), dim=-1)
    assert torch.allclose(seen, expected, atol=0.015)


@pytest.mark.parametrize("temperature", [-0.1, float("nan"), float("inf")])
def test_temperature_that_means_nothing_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match=r"temperature=.*must be a finite number >= 0"):
        sample_token(torch.zeros(1, 4), temperature)


def test_greedy_generation_equals_the_full_forward_at_every_token(model: TinyLM) -> None:
    prompt = torch.randint(1, 256, (2, 5))
    ids = generate(model, prompt, 40, temperature=0)  # beyond l, l_sel and w of the tiny config
    assert ids.shape == (2, 45)
    assert torch.equal(ids[:, :5], prompt)
    with torch.no_grad():
        choices = model.eval()(ids[:, :-1]).argmax(-1)  # [2, 44]
    assert torch.equal(ids[:, 5:], choices[:, 4:])


def test_same_seed_writes_the_same_text_and_another_seed_another(model: TinyLM) -> None:
    prompt = torch.tensor([[72, 105]])
    first, again, other = (generate(model, prompt, 30, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_generation_of_nothing_returns_the_prompt(model: TinyLM) -> None:
    prompt = torch.tensor([[72, 105]])
    assert torch.equal(generate(model, prompt, 0), prompt)


def test_generation_leaves_the_model_as_it_was(model: TinyLM) -> None:
    model.train()
    generate(model, torch.tensor([[1]]), 3)
    assert model.training
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("prompt", "num_tokens"),
    [(torch.ones(3, dtype=torch.int64), 1), (torch.ones(1, 0, dtype=torch.int64), 1),
     (torch.ones(1, 2, dtype=torch.int64), -1)],
)  # fmt: skip
def test_prompt_that_cannot_be_continued_is_refused(
    model: TinyLM, prompt: torch.Tensor, num_tokens: int
) -> None:
    with pytest.raises(ValueError, match=r"a prompt is \[batch, tokens\]"):
        generate(model, prompt, num_tokens)


def test_sample_text_begins_with_the_prompt_and_is_repeatable(
    model: TinyLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsa.generate.decode.SAMPLE_TOKENS", 40)
    text = sample_text(model, ByteTokenizer(), seed=5)
    assert text.startswith(PROMPT)
    assert text == sample_text(model, ByteTokenizer(), seed=5)
    assert text != sample_text(model, ByteTokenizer(), seed=6)


def test_sample_text_ends_at_the_end_of_a_document(model: TinyLM) -> None:
    assert model.lm_head is not None
    torch.nn.init.zeros_(model.lm_head.weight)  # all bytes alike: byte 0 comes soon
    text = sample_text(model, ByteTokenizer(), seed=5)
    assert "\0" not in text
    assert len(text) < SAMPLE_TOKENS
