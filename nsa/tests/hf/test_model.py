"""NSAForCausalLM: the weights, logits and texts of its TinyLM, with and without padding."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.generate import Sampling, generate
from nsa.model import TinyLM
from nsa.model.folder import CODE, CONFIG, WEIGHTS, load_folder
from nsa.tests.hf.conftest import SIZES, new_model

transformers = pytest.importorskip("transformers", reason="the extra hf installs it")
hf = pytest.importorskip("nsa.hf")

Models = dict[str, Any]


def padded(prompts: list[Tensor], left: bool = True) -> dict[str, Tensor]:
    """Prompts as a batch, with padding (id 9, which prompts have too) on one side."""
    width = max(len(one) for one in prompts)
    ids = torch.full((len(prompts), width), 9)
    mask = torch.zeros_like(ids)
    for row, one in enumerate(prompts):
        place = slice(width - len(one), None) if left else slice(len(one))
        ids[row, place], mask[row, place] = one, 1
    return {"input_ids": ids, "attention_mask": mask}


def some_prompts(*lengths: int) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randint(0, 64, (length,)) for length in lengths]


# --- folders ---


def test_saved_models_come_back_bit_equal_by_the_auto_class_and_as_a_tinylm(
    models: Models, tmp_path: Path
) -> None:
    for kind, model in models.items():
        model.save_pretrained(tmp_path / kind, max_shard_size="9KB")
        back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / kind)
        settings, weights = load_folder(tmp_path / kind)
        assert type(back) is hf.NSAForCausalLM and (tmp_path / kind / CODE).exists()
        assert not (tmp_path / kind / WEIGHTS).exists(), "in shards"
        ours = TinyLM(**settings)
        ours.load_state_dict(weights)
        for name, one in model.model.state_dict().items():
            assert torch.equal(one, back.model.state_dict()[name]), (kind, name)
            assert torch.equal(one, ours.state_dict()[name]), (kind, name)
        assert back.config.to_diff_dict() == model.config.to_diff_dict()


def test_fields_of_the_config_are_the_arguments_of_the_model(tmp_path: Path) -> None:
    config = hf.NSAConfig(**SIZES, rule="pooled", tie_word_embeddings=True)
    assert config.model_arguments().items() >= {"vocab": 64, "dim": 32, "rule": "pooled"}.items()
    assert config.hidden_size == 32 and config.num_hidden_layers == 2 and config.tie_embeddings
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / CONFIG).read_text())
    assert {"vocab_size", *config.model_arguments()} - {"vocab"} <= written.keys()
    assert transformers.AutoConfig.from_pretrained(tmp_path).to_diff_dict() == config.to_diff_dict()
    with pytest.raises(ValueError, match="dim is '32'; it must be of type int"):
        hf.NSAForCausalLM(hf.NSAConfig(dim="32"))


def test_weights_load_in_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    new_model("nsa").to(torch.bfloat16).save_pretrained(tmp_path)
    for asked, got in (("auto", torch.bfloat16), (torch.float32, torch.float32)):
        model = hf.NSAForCausalLM.from_pretrained(tmp_path, dtype=asked)
        assert {one.dtype for one in model.parameters()} == {got}
    ids = torch.randint(0, 64, (1, 40))
    assert model.to(torch.bfloat16).generate(ids, max_new_tokens=3, do_sample=False).shape == (
        1,
        43,
    )


def test_weights_of_another_model_are_refused(models: Models, tmp_path: Path) -> None:
    models["nsa"].save_pretrained(tmp_path / "good")
    for change, said in (
        ({"n_layers": 3}, "missing keys, such as model.blocks.2"),
        ({"n_layers": 1}, "unexpected keys, such as model.blocks.1"),
        ({"tie_embeddings": True}, "unexpected keys, such as model.lm_head.weight"),
    ):
        shutil.copytree(tmp_path / "good", tmp_path / "bad", dirs_exist_ok=True)
        config = json.loads((tmp_path / "good" / CONFIG).read_text()) | change
        (tmp_path / "bad" / CONFIG).write_text(json.dumps(config))
        with pytest.raises(ValueError, match=f"{said}.*use another copy"):
            hf.NSAForCausalLM.from_pretrained(tmp_path / "bad")
    (tmp_path / "good" / WEIGHTS).rename(tmp_path / "good" / "pytorch_model.bin")
    with pytest.raises(OSError, match="no file named model.safetensors"):
        hf.NSAForCausalLM.from_pretrained(tmp_path / "good")


def test_a_vocabulary_can_grow(tmp_path: Path) -> None:
    for kind in ("nsa", "tied"):
        model = new_model(kind)
        model.resize_token_embeddings(70, mean_resizing=False)
        assert model(torch.tensor([[69, 1]])).logits.shape == (1, 2, 70)
        model.save_pretrained(tmp_path / kind)
        assert load_folder(tmp_path / kind)[0]["vocab"] == 70


# --- the forward pass ---


def test_logits_of_a_padded_batch_are_those_of_single_rows(models: Models) -> None:
    prompts = some_prompts(5, 40, 1, 18)
    for kind, model in models.items():
        for left in (True, False):
            given = padded(prompts, left)
            logits = model(**given).logits
            real = given["attention_mask"].bool()
            for row, one in enumerate(prompts):
                alone = model(one[None]).logits[0]
                assert torch.allclose(logits[row][real[row]], alone, atol=1e-6), (kind, left)
            assert (logits[~real] == 0).all()


def test_packed_documents_are_those_of_single_rows(models: Models) -> None:
    prompts = some_prompts(5, 30, 13)
    positions = torch.cat([torch.arange(len(one)) for one in prompts])[None]
    for kind, model in models.items():
        logits = model(torch.cat(prompts)[None], position_ids=positions).logits[0]
        alone = torch.cat([model(one[None]).logits[0] for one in prompts])
        assert torch.allclose(logits, alone, atol=1e-6), kind


def test_only_the_wanted_logits_are_computed(models: Models) -> None:
    ids, model = torch.randint(0, 64, (2, 30)), models["pooled"]
    whole = model(ids).logits
    assert torch.equal(model(ids, logits_to_keep=3).logits, whole[:, -3:])
    places = torch.tensor([0, 7])
    assert torch.equal(model(ids, logits_to_keep=places).logits, whole[:, places])
    assert torch.equal(model(ids, return_dict=False)[0], whole)


def test_the_loss_is_that_of_transformers(models: Models) -> None:
    """A Llama's loss of the same logits; padding predicts nothing."""
    prompts, model = some_prompts(20, 33), models["nsa"]
    given = padded(prompts, left=False)
    labels = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
    logits = model(**given).logits
    for num_items in (None, torch.tensor(100)):
        theirs = transformers.LlamaForCausalLM.loss_function.fget(model)(
            logits, labels, vocab_size=64, num_items_in_batch=num_items
        )
        ours = model(**given, labels=labels, num_items_in_batch=num_items).loss
        assert torch.allclose(ours, theirs)
    sides = [padded(prompts, left) for left in (True, False)]
    found = [
        model(**one, labels=one["input_ids"].masked_fill(one["attention_mask"] == 0, -100)).loss
        for one in sides
    ]
    assert torch.allclose(*found)


def test_what_the_model_cannot_do_is_refused(models: Models) -> None:
    ids, model = torch.randint(0, 64, (2, 10)), models["nsa"]
    mask = torch.ones_like(ids)
    for given, said in (
        ({"inputs_embeds": torch.zeros(1, 2, 32)}, "reads token ids only: pass input_ids"),
        ({"input_ids": ids, "output_attentions": True}, "output_attentions is not known"),
        ({"input_ids": ids, "attention_mask": mask[None, None]}, "masks between tokens are not"),
        ({"input_ids": ids, "attention_mask": 0 * mask}, "0 everywhere; at least one token"),
        ({"input_ids": ids, "position_ids": 3 * mask}, "other positions are not supported"),
        ({"input_ids": ids, "labels": ids, "logits_to_keep": 1}, "needs all logits; pass 0"),
        ({"input_ids": ids, "labels": ids, "use_cache": True}, "it has no gradients; call"),
        ({"input_ids": ids, "past_key_values": object()}, "a cache of its own: pass"),
    ):
        with pytest.raises(ValueError, match=said):
            model(**given)


# --- generation ---


def test_greedy_text_is_that_of_nsa_generate_and_of_the_plain_forward(models: Models) -> None:
    prompts = torch.stack(some_prompts(40, 40))
    for kind, model in models.items():
        num = 64 if kind in ("nsa", "reuse") else 10
        text = model.generate(prompts, max_new_tokens=num, do_sample=False)
        assert torch.equal(text, generate(model.model, prompts, num, Sampling(temperature=0))), kind
        assert torch.equal(model(text).logits[:, 39:-1].argmax(-1), text[:, 40:]), kind


def test_text_of_a_padded_batch_is_that_of_single_prompts(models: Models) -> None:
    prompts = some_prompts(5, 33, 33, 18)
    given = padded(prompts)
    for kind, model in models.items():
        text = model.generate(**given, max_new_tokens=6, do_sample=False)
        for row, one in enumerate(prompts):
            alone = model.generate(one[None], max_new_tokens=6, do_sample=False)
            assert torch.equal(text[row, 33 - len(one) :], alone[0]), (kind, row)
        plain = model.generate(**given, max_new_tokens=3, do_sample=False, use_cache=False)
        assert torch.equal(plain, text[:, : 33 + 3]), kind


def test_rows_of_a_cache_have_lengths_of_their_own(models: Models) -> None:
    given, cache = padded(some_prompts(5, 33, 33, 18)), hf.GenerationCache()
    models["nsa"](**given, past_key_values=cache)
    assert cache.lengths == [5, 33, 33, 18] and cache.get_seq_length() == 33
    assert cache.nbytes() > 0


def test_a_prompt_in_pieces_and_a_text_that_outgrows_its_cache(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of a padded prompt split rows late; a cache for 40 tokens is made again."""
    given, options = padded(some_prompts(5, 33)), {"max_new_tokens": 12, "do_sample": False}
    for kind in ("nsa", "reuse", "dense"):
        text = models[kind].generate(**given, **options)
        with monkeypatch.context() as patch:
            patch.setattr("nsa.generate.rows.FIRST_TOKENS", 40)
            pieces = models[kind].generate(**given, **options, prefill_chunk_size=8)
        assert torch.equal(pieces, text), kind


def test_a_text_goes_on_where_its_cache_ended(models: Models) -> None:
    prompt, options = some_prompts(20)[0][None], {"do_sample": False}
    for kind in ("nsa", "pooled"):
        model = models[kind]
        first = model.generate(prompt, max_new_tokens=9, return_dict_in_generate=True, **options)
        more = model.generate(
            first.sequences, past_key_values=first.past_key_values, max_new_tokens=9, **options
        )
        assert torch.equal(more, model.generate(prompt, max_new_tokens=18, **options)), kind


def test_samples_repeat_with_their_seed_and_differ_between_rows(models: Models) -> None:
    prompt, options = some_prompts(20)[0][None], {"max_new_tokens": 16, "do_sample": True}
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append(models["nsa"].generate(prompt, num_return_sequences=3, **options))
    assert torch.equal(*drawn) and len({tuple(row.tolist()) for row in drawn[0]}) == 3


def test_generation_that_is_not_supported_is_refused(models: Models) -> None:
    prompt, model = some_prompts(20)[0][None], models["nsa"]
    for given, said in (
        ({"num_beams": 2}, "by beam search; this model has greedy search and sampling: use"),
        ({"assistant_model": models["tied"]}, "assisted generation; this model has greedy"),
        ({"cache_implementation": "static"}, "'static'; this model has a cache of its own"),
        ({"attention_mask": torch.zeros_like(prompt)}, "row 0 of attention_mask has no token"),
    ):
        with pytest.raises(ValueError, match=said):
            model.generate(prompt, max_new_tokens=2, **given)
    with pytest.raises(ValueError, match="continuous batching needs an attention"):
        model.generate_batch([[1, 2]])
