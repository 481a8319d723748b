"""What a stage of training needs and leaves: its rows, its model, and what that has learned."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from nsa.config import Config
from nsa.data.documents import TRAIN, VAL
from nsa.data.tokenizers import HFTokenizer
from nsa.model import TinyLM
from nsa.records import MODEL
from nsa.train.checkpoint.model_file import load_model
from studies.long_context.presets import Preset
from studies.long_context.probe import probe
from studies.long_context.results import Probe
from studies.long_context.shards import RowMaker, write_shards
from studies.long_context.text import TOKENIZER, Say, prepare_text, read_hay
from studies.long_context.train import shards_folder, stage_folder
from studies.long_context.training_rows import Mixture, make_row
from studies.long_context.vocabulary import find_words

VAL_BATCHES = 16
"""Held-out batches of a stage, for the loss that the trainer measures."""
LITTLE = 1_000_000
"""Tokens of rows that are not worth other processes."""
PROBE_TOKENS = 131072
"""Tokens of the held-out rows that a model is probed with."""


def make_data(source: Path | None, out: Path, preset: Preset, say: Say) -> Path:
    """Write the text, whose folder is returned, and the rows of every stage."""
    text = out / "text"
    vocab, digits, chars = preset.vocab, preset.digits, preset.text_chars
    prepare_text(source, text, vocab=vocab, digits=digits, chars=chars, say=say)
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:  # starts nobody unasked
        for number, stage in enumerate(preset.stages):
            maker = RowMaker(
                text=text,
                mixture=mixture_of(preset, number),
                digits=digits,
                num_keys=stage.num_keys,
                seed=preset.seed,
            )
            tokens = stage.steps * stage.batch_size * stage.seq_len
            num_rows = {TRAIN: stage.steps * stage.batch_size, VAL: VAL_BATCHES * stage.batch_size}
            many = pool if tokens > LITTLE else None
            write_shards(shards_folder(out, preset, number), maker, num_rows, say, many)
    return text


def mixture_of(preset: Preset, number: int) -> Mixture:
    """What the rows of a stage are made of."""
    stage = preset.stages[number]
    return Mixture(seq_len=stage.seq_len, growing=stage.growing)


def load_stage(attention: str, preset: Preset, number: int, out: Path) -> tuple[TinyLM, Config]:
    """The model that a stage has left, on a GPU in the precision of its training."""
    model, cfg = load_model(stage_folder(out, attention, preset, number) / MODEL)
    return model.to("cuda", torch.bfloat16) if torch.cuda.is_available() else model, cfg


def probe_stage(attention: str, preset: Preset, number: int, out: Path, text: Path) -> Probe:
    """Ask the model of a stage for all answers in held-out rows of that stage."""
    model, _ = load_stage(attention, preset, number, out)
    tokenizer = HFTokenizer(text / TOKENIZER)
    words = find_words(tokenizer, preset.digits, preset.stages[number].num_keys)
    mixture, hay = mixture_of(preset, number), read_hay(text, VAL, words)
    num = max(1, min(PROBE_TOKENS, preset.batch_tokens) // mixture.seq_len)
    rows = [make_row(i, VAL, mixture, hay, words, tokenizer.eos, preset.seed) for i in range(num)]
    return probe(model, rows, attention, preset.batch_tokens)
