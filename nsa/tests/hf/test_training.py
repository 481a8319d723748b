"""Training with the tools of Hugging Face: Trainer, gradient checkpointing, LoRA, torch.compile."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.config import Config, TrainConfig, load_config
from nsa.tests.conftest import REPOSITORY, TINY
from nsa.tests.hf.conftest import new_model
from nsa.train.build import build_step
from nsa.train.optimizer import build_optimizer
from nsa.train.runtime import resolve_runtime
from nsa.train.step import MicroBatch

transformers = pytest.importorskip("transformers", reason="the extra hf installs it")
NUM_STEPS = 20
LR = 1e-3


def some_rows(num_rows: int) -> Tensor:  # [num_rows, 33]
    return torch.randint(0, 64, (num_rows, 33), generator=torch.Generator().manual_seed(0))


def gradients(model: Any, **given: Any) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(**given).loss
    loss.backward()
    named = model.named_parameters()
    return loss.item(), {name: one.grad.clone() for name, one in named if one.grad is not None}


def trained(model: Any, folder: Path, accumulate: int, rows: Tensor) -> list[float]:
    """Losses of NUM_STEPS updates by Trainer with the optimizer of our trainer."""
    losses: list[float] = []

    class Recorded(transformers.Trainer):  # type: ignore[misc, name-defined]
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss: Tensor = super().training_step(*args, **kwargs)
            losses.append(loss.item())
            return loss

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4 // accumulate,
        gradient_accumulation_steps=accumulate,
        max_steps=NUM_STEPS,
        max_grad_norm=1.0,
        train_sampling_strategy="sequential",
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    optimizer = build_optimizer(model.model, TrainConfig(lr=LR))
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    examples = [{"input_ids": row, "labels": row} for row in rows]
    Recorded(model, arguments, train_dataset=examples, optimizers=(optimizer, constant)).train()
    return [sum(losses[i : i + accumulate]) for i in range(0, len(losses), accumulate)]


def our_losses(model: Any, rows: Tensor) -> list[float]:
    """Losses of our trainer's own step, on the same rows."""
    settings = [*TINY, f"train.lr={LR}", "train.grad_clip=1.0"]
    cfg: Config = load_config(REPOSITORY / "configs" / "base.yaml", settings, environ={})
    step = build_step(cfg, model, resolve_runtime(cfg.runtime))
    batches = rows.split(4)
    return [step([MicroBatch(batch)], LR).loss.item() for batch in batches]


def test_trainer_gives_the_losses_and_weights_of_our_own_steps(tmp_path: Path) -> None:
    rows = some_rows(4 * NUM_STEPS)
    for accumulate in (1, 2):
        model = new_model("nsa").train()
        ours = copy.deepcopy(model.model)
        theirs = trained(model, tmp_path, accumulate, rows)
        assert theirs == pytest.approx(our_losses(ours, rows), abs=1e-5), accumulate
        for one, other in zip(model.model.parameters(), ours.parameters(), strict=True):
            assert torch.allclose(one, other, atol=1e-5), accumulate


def test_indexers_learn_by_their_share_of_an_update() -> None:
    """Half batches with the number of all targets have together the loss of the whole batch."""
    model, rows = new_model("msa").train(), some_rows(4)
    loss, whole = gradients(model, input_ids=rows, labels=rows)
    assert whole["model.blocks.0.attn.rule.proj_q.weight"].abs().max() > 1e-6
    num_items = torch.tensor(4 * 32)
    halves = [
        gradients(model, input_ids=half, labels=half, num_items_in_batch=num_items)
        for half in rows.split(2)
    ]
    assert sum(half[0] for half in halves) == pytest.approx(loss, abs=1e-5)
    for name, grad in whole.items():
        assert torch.allclose(halves[0][1][name] + halves[1][1][name], grad, atol=1e-6), name
    text = model.eval()(rows, labels=rows).loss.item()
    model.config.index_loss = 0.0
    assert gradients(model.train(), input_ids=rows, labels=rows)[0] == pytest.approx(text)
    assert loss > text + 1e-3


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    rows = some_rows(2)
    for kind in ("nsa", "reuse"):
        model = new_model(kind).train()
        loss, plain = gradients(model, input_ids=rows, labels=rows)
        model.gradient_checkpointing_enable()
        assert model.is_gradient_checkpointing and list(model.model.checkpointed) == [0, 1]
        again, recomputed = gradients(model, input_ids=rows, labels=rows)
        assert again == loss and all(torch.equal(plain[name], recomputed[name]) for name in plain)
        model.gradient_checkpointing_disable()
        assert not model.is_gradient_checkpointing and list(model.model.checkpointed) == []
    with pytest.raises(ValueError, match="checkpointed without reentrance: use"):
        model.gradient_checkpointing_enable({"use_reentrant": True})


def test_lora_trains_its_own_weights_alone(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="the extra dev installs it")
    model, rows = new_model("pooled").train(), some_rows(4)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    layers = ["qkv", "out", "fc1", "fc2"]
    tuned = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=layers, task_type="CAUSAL_LM")
    )
    tuned.gradient_checkpointing_enable()
    weights = [one for one in tuned.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-2)
    losses = []
    for _ in range(5):
        loss, _ = gradients(tuned, input_ids=rows, labels=rows)
        optimizer.step()
        losses.append(loss)
    assert losses[-1] < losses[0] - 0.01
    base = {name.replace(".base_layer", ""): one for name, one in model.state_dict().items()}
    assert all(torch.equal(base[name], one) for name, one in before.items())
    tuned.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(new_model("pooled"), tmp_path)
    assert torch.equal(again(rows).logits, tuned.eval()(rows).logits)


# torch warns about what its own tracer does; outside of tests that stays unseen.
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor",
    "ignore:.*should not be instantiated:DeprecationWarning",
)
def test_a_compiled_model_has_the_gradients_of_a_plain_one() -> None:
    rows = some_rows(2)
    for kind, num_layers in (("nsa", 1), ("msa", 2)):  # tracing a layer of nsa takes five seconds
        torch.compiler.reset()
        model = new_model(kind, n_layers=num_layers).train()
        loss, plain = gradients(model, input_ids=rows, labels=rows)
        compiled = torch.compile(model, backend="aot_eager")
        again, traced = gradients(compiled, input_ids=rows, labels=rows)
        assert again == pytest.approx(loss, abs=1e-6)
        for name, one in plain.items():
            assert torch.allclose(one, traced[f"_orig_mod.{name}"], atol=1e-6), (kind, name)
    torch.compiler.reset()
