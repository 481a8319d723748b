"""The examples run as scripts, small, in an empty folder; what they print is what they promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from nsa.tests.conftest import REPOSITORY

pytestmark = pytest.mark.usefixtures("forked_python")
EXAMPLES = REPOSITORY / "examples"


@pytest.fixture(autouse=True)
def _no_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks at the curves of these runs."""
    monkeypatch.setenv("NSA_TB_DISABLE", "1")


def run_example(name: str, folder: Path, *flags: str) -> str:
    """Run an example in a folder; return what it printed."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *flags]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def numbers(pattern: str, printed: str) -> list[float]:
    """The numbers of a line, in the groups of a pattern that matches it once."""
    (match,) = re.finditer(pattern, printed, re.MULTILINE)
    return [float(group) for group in match.groups()]


def test_block_equals_the_oracle_and_does_not_see_the_future(tmp_path: Path) -> None:
    printed = run_example("attention_block", tmp_path, "--tokens", "300")
    output, gradients = numbers(r"output ([\d.e-]+), gradients ([\d.e-]+)$", printed)
    assert 0 < output < 1e-5 and 0 < gradients < 1e-5
    assert "after a change of token 299, the output differs at [299]\n" in printed


def test_operator_shows_the_blocks_that_the_last_query_read(tmp_path: Path) -> None:
    printed = run_example("attention_block", tmp_path, "--tokens", "300")
    lists = re.findall(r"read blocks \[([\d, ]+)\]", printed)
    chosen = [[int(block) for block in text.split(", ")] for text in lists]
    assert len(chosen) == 2 and all(len(set(blocks)) == 5 for blocks in chosen)
    assert all({0, 8, 9} <= set(blocks) <= {*range(10)} for blocks in chosen), "the forced ones"
    # 36 compressed tokens, 4 whole blocks of 32 and 12 tokens of the last, a window of 64.
    assert numbers(r"that is (\d+) tokens", printed) == [36 + 4 * 32 + 12 + 64]


def test_training_on_the_default_text_lowers_the_loss(tmp_path: Path) -> None:
    printed = run_example("train_on_your_text", tmp_path, "--steps", "25")
    first, last, held_out = numbers(r"^loss: ([\d.]+) -> ([\d.]+) .*held out ([\d.]+)$", printed)
    assert first > 5 and last < first - 1.5 and held_out < first - 1.5
    assert re.search(r"^text: 'The ' \+ .{20,}$", printed, re.MULTILINE)
    assert (tmp_path / "artifacts/your_text/run/model.pt").is_file()


def test_training_takes_a_text_of_the_user_and_starts_over_in_the_same_folder(
    tmp_path: Path,
) -> None:
    text = "\n\n".join(
        f"Paragraph {i}: the café opens at {i % 24}." + " more" * 40 for i in range(400)
    )
    (tmp_path / "mine.txt").write_text(text, encoding="utf-8")
    flags = ["mine.txt", "--steps", "2", "--out-dir", "here", "--prompt", "Paragraph"]
    for _ in range(2):
        printed = run_example("train_on_your_text", tmp_path, *flags)
        assert f"text: mine.txt, {len(text.encode())} bytes in 80 documents\n" in printed
        assert "in 2 steps" in printed and "text: 'Paragraph' + " in printed


def test_fine_tuning_begins_far_below_an_untrained_model(tmp_path: Path) -> None:
    printed = run_example("fine_tune", tmp_path, "--steps", "30")
    line = r"^{}: (\d+) steps, \d rows of (\d+) bytes: loss ([\d.]+) -> [\d.]+, held out ([\d.]+)$"
    base_steps, base_len, untrained, _ = numbers(line.format("base"), printed)
    steps, length, first, held_out = numbers(line.format("tuned"), printed)
    assert (base_steps, base_len, steps, length) == (30, 64, 15, 256)
    assert first < untrained - 1.5 and held_out < untrained - 1.5
    assert "weights of artifacts/fine_tune/base/model.pt (sha256 " in printed


def test_a_switched_llama_equals_it_with_all_blocks_and_trains_on_with_few(tmp_path: Path) -> None:
    printed = run_example("switch_llama", tmp_path, "--steps", "16")
    (same,) = numbers(r"^all blocks: logits differ from the Llama's by ([\d.e-]+)$", printed)
    (other,) = numbers(r"^few blocks: logits differ from the Llama's by ([\d.e-]+)$", printed)
    assert same < 1e-5 < 1e-3 < other
    line = r"^fine-tuned: 8 steps, .* for 4: loss ([\d.]+) -> [\d.]+, held out ([\d.]+)$"
    first, held_out = numbers(line, printed)
    assert held_out < 4.2 and first < 4.2, "ln 256 = 5.55 without the Llama's weights"
    assert (tmp_path / "artifacts/switch_llama/run/model.pt").is_file()


def test_an_exported_model_continues_a_padded_batch_in_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the extra hf installs it")
    printed = run_example("hugging_face", tmp_path, "--steps", "10")
    first, last = numbers(r"^run: loss ([\d.]+) -> ([\d.]+)$", printed)
    assert first > 5 and last < first
    assert "config.json generation_config.json model.safetensors modeling_nsa.py" in printed
    assert "loaded: NSAForCausalLM, 399500 parameters, all bit-equal\n" in printed
    assert len(re.findall(r"^text: '.*' \+ .+$", printed, re.MULTILINE)) == 3


def test_needle_is_found_and_its_block_selected(tmp_path: Path) -> None:
    printed = run_example("needle", tmp_path, "--picture", "needle.png")
    before, after = printed.split("after ")
    ((_, _, guessed, by_chance),) = table(before)
    rows = table(after)
    assert guessed < 30 and by_chance < 40  # 8 values; one free choice of 9 blocks
    trained = [row for row in rows if row[0] == 73]
    assert [row[1] for row in trained] == [1, 3, 5]
    assert all(answered > 80 and selected > 60 for _, _, answered, selected in trained)
    longer = [row for row in rows if row[0] == 217]
    assert len(longer) == 3 and max(selected for *_, selected in longer) > 40  # chance: 4
    assert (tmp_path / "needle.png").stat().st_size > 1000


def table(printed: str) -> list[tuple[int, ...]]:
    """The lines of needle.py: tokens, block, percent right, percent selected."""
    lines = re.findall(r"^ +(\d+) +(\d+) +(\d+)% +(\d+)%$", printed, re.MULTILINE)
    return [tuple(map(int, line)) for line in lines]


def test_every_example_has_its_command_in_the_readme() -> None:
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    assert scripts == set(re.findall(r"python examples/(\w+\.py)", readme)) != set()
