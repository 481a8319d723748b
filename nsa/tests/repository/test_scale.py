"""The simulation of docs/scale.md: its table is the script's, and agrees with measurements."""

from __future__ import annotations

import pytest

from bench import scale
from nsa.model.cost import block_spec
from nsa.parallel import Split, received_bytes
from nsa.tests.conftest import REPOSITORY


@pytest.fixture(scope="module")
def page() -> str:
    return (REPOSITORY / "docs" / "scale.md").read_text(encoding="utf-8")


def test_the_page_has_the_table_of_the_script(
    page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scale.updated(page) == page, "run python bench/scale.py --page docs/scale.md"
    assert scale.main([]) == 0
    assert capsys.readouterr().out.strip() == scale.table()
    assert scale.table().count("\n") == 1 + 2 * len(scale.LENGTHS) * len(scale.GPUS)


def test_the_page_names_what_the_script_assumes(page: str) -> None:
    said = (
        f"{scale.flops_per_s() / 1e12:.0f} TFLOP/s",
        f"{scale.NVLINK_BYTES_PER_S / 1e9:.0f} GB/s per GPU and direction, among {scale.NODE} GPUs",
        f"400 Gb/s, {scale.INFINIBAND_BYTES_PER_S / 1e9:.0f} GB/s",
        f"{100 * scale.REACHED:.0f} % of these speeds",
        f"takes {scale.PART_FACTOR} / P",
        f"takes {1e6 * scale.START_S:.0f} us, and {1e6 * scale.HOP_S:.0f} us more",
        f"at most {scale.BATCH_TOKENS >> 20}M tokens",
        "85 % of 141 GB",
    )
    assert [text for text in said if text not in page] == []
    assert scale.MEMORY_BYTES == 0.85 * 141e9


@pytest.mark.parametrize("name", scale.SHAPES)
def test_the_fit_is_close_to_the_measured_kernels(name: str) -> None:
    model = scale.config_of(name, 65536).model
    rows = scale._measured(model.n_heads, model.n_kv_groups, model.d_k)
    fitted = [row for row in rows if row["S"] >= scale.FIT_FROM]
    assert len(fitted) == 3
    for row in fitted:
        forward, both = scale.attention_s(scale.config_of(name, row["S"]))
        assert 1e3 * forward == pytest.approx(row["fwd_graph_ms"], rel=0.03)
        assert 1e3 * both == pytest.approx(row["both_graph_ms"], rel=0.03)


def test_one_gpu_takes_the_measured_step() -> None:
    length, step_s = scale.MEASURED_STEP
    step = scale.simulate("125M", length, 1, 1, recompute=False)
    assert step.attention_s + step.rest_s == pytest.approx(step_s)
    assert step.keys_s == 0


def test_keys_are_the_bytes_of_the_formula_over_the_link() -> None:
    config = scale.config_of("8B", 1 << 18)
    step = scale.simulate("8B", 1 << 18, 64, 32, recompute=True)
    layer, split = scale._layer(config.model, block_spec(config)), Split(1 << 18, 32)
    most = max(received_bytes(layer, split, rank) for rank in range(32))
    # 32 ranks are four nodes; three passes of 32 layers, four collectives each.
    seconds = most / (0.8 * 400e9) + 4 * 24e-6
    assert step.keys_s == pytest.approx(3 * 32 * seconds)
    assert 0 < step.communication < 1
    assert step.num_rows == 2


def test_a_plan_fits_memory_and_batch() -> None:
    for step in scale.plans("8B", 1 << 20, 64):
        assert step.num_rows * step.length <= scale.BATCH_TOKENS
        size = scale.memory_bytes("8B", 1 << 20, 64, step.cp, step.recompute)
        assert size <= scale.MEMORY_BYTES
    assert scale.best_step("8B", 1 << 20, 8) is None  # the page says why
    assert "does not fit" in scale.table()
