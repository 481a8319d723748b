"""Generation of tokens through prefill and the decode cache."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from nsa.config import Config
from nsa.data import ByteTokenizer
from nsa.generate import Sampling, generate, next_tokens, sample_text
from nsa.generate.decode import SAMPLE_TOKENS
from nsa.model import ModelCache, TinyLM
from nsa.records.results import PROMPT

GREEDY = Sampling(temperature=0)


@pytest.fixture
def model(tiny_config: Callable[..., Config]) -> TinyLM:
    return new_model(tiny_config())


def new_model(cfg: Config) -> TinyLM:
    """An untrained model whose logits differ enough to make greedy choices clear."""
    torch.manual_seed(0)
    model = TinyLM.from_config(cfg, vocab=256)
    torch.nn.init.normal_(model.embed.weight)
    assert model.lm_head is not None
    torch.nn.init.normal_(model.lm_head.weight)
    return model


def test_greedy_generation_equals_the_full_forward_at_every_token(model: TinyLM) -> None:
    prompt = torch.randint(1, 256, (2, 5))
    ids = generate(model, prompt, 40, GREEDY)  # beyond l, l_sel and w of the tiny config
    assert ids.shape == (2, 45)
    assert torch.equal(ids[:, :5], prompt)
    with torch.no_grad():
        choices = model.eval()(ids[:, :-1]).argmax(-1)  # [2, 44]
    assert torch.equal(ids[:, 5:], choices[:, 4:])


def test_same_seed_writes_the_same_text_and_another_seed_another(model: TinyLM) -> None:
    prompt = torch.tensor([[72, 105]])
    first, again, other = (generate(model, prompt, 30, Sampling(seed=seed)) for seed in (1, 1, 2))
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


def test_a_small_model_decodes_on_one_thread_and_the_others_are_given_back(
    model: TinyLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    real = model.step

    def step(ids: torch.Tensor, cache: ModelCache) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return real(ids, cache)

    monkeypatch.setattr(model, "step", step)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        generate(model, torch.tensor([[1]]), 3)
        assert torch.get_num_threads() == 2
        monkeypatch.setattr("nsa.generate.decode.ONE_THREAD_BELOW", 0)
        generate(model, torch.tensor([[1]]), 2)
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 1, 2]


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


@pytest.mark.parametrize("tile", [1, 7, 64])
def test_a_prompt_in_tiles_gives_the_tokens_of_one_piece(
    tiny_config: Callable[..., Config], tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = torch.randint(1, 256, (1, 50))
    whole = generate(new_model(tiny_config()).double(), prompt, 10, GREEDY)
    monkeypatch.setenv("NSA_PREFILL_TILE", str(tile))
    assert torch.equal(generate(new_model(tiny_config()).double(), prompt, 10, GREEDY), whole)


def test_a_prompt_that_does_not_fit_the_cache_is_refused_before_it_is_read(model: TinyLM) -> None:
    cache = model.new_cache(batch=1, max_len=8)
    with pytest.raises(ValueError, match=r"0 \+ 9 tokens do not fit a cache for 8; make it"):
        model.prefill_last(torch.ones(1, 9, dtype=torch.int64), cache)
    assert cache.length == 0


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(seed=3, top_p=0.9, repetition_penalty=1.3)])
def test_each_row_of_a_batch_gets_what_it_would_get_alone(
    model: TinyLM, sampling: Sampling
) -> None:
    prompts = torch.randint(1, 256, (5, 6))
    together = generate(model.double(), prompts, 25, sampling)
    alone = [generate(model, prompt[None], 25, sampling) for prompt in prompts]
    assert torch.equal(together, torch.cat(alone))


def test_a_repetition_penalty_counts_the_prompt_and_the_text(model: TinyLM) -> None:
    prompt = torch.randint(1, 256, (1, 6))
    harsh = Sampling(temperature=0, repetition_penalty=1e6)
    torch.nn.init.ones_(model.norm.weight)
    assert model.lm_head is not None
    model.lm_head.weight.data.abs_()
    ids = generate(model, prompt, 60, harsh)[0].tolist()
    assert len(set(ids)) == len(set(prompt[0].tolist())) + 60


def test_tokens_come_one_by_one_and_the_model_is_put_back_when_nobody_wants_more(
    model: TinyLM,
) -> None:
    model.train()
    tokens = next_tokens(model, torch.tensor([[1, 2]]), 1000, GREEDY)
    next(tokens)
    assert not model.training
    tokens.close()  # type: ignore[attr-defined]
    assert model.training


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
