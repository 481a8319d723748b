"""Environment variables: typed, strict, and some of them stand for config keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nsa.config import ConfigError, known_keys, load_config, to_container
from nsa.config.env import (
    TABLE,
    check_environment,
    config_overrides,
    in_effect,
    raw,
    read,
    texts,
    texts_key,
)

PARSED = {
    ("NSA_STRICT_ASSERTS", "1"): True,
    ("NSA_STRICT_ASSERTS", "True"): True,
    ("NSA_SEL_RANGES_V2", "0"): False,
    ("NSA_SEL_RANGES_V2", "off"): False,
    ("NSA_PREFILL_TILE", "4096"): 4096,
    ("NSA_LR", "3e-4"): 3e-4,
    ("NSA_FORCE_BRANCH", "sel"): "sel",
    ("CONFIG", "a.yaml"): "a.yaml",
}


@pytest.mark.parametrize(("name", "text"), PARSED)
def test_a_variable_is_read_in_its_type(name: str, text: str) -> None:
    value = read(name, {name: text})

    assert value == PARSED[name, text] and type(value) is TABLE[name].kind


@pytest.mark.parametrize("name", TABLE)
def test_unset_and_empty_give_the_default(name: str) -> None:
    assert read(name, {}) == TABLE[name].default
    assert read(name, {name: ""}) == TABLE[name].default


@pytest.mark.parametrize("name", TABLE)
def test_a_default_has_the_type_of_its_variable(name: str) -> None:
    variable = TABLE[name]

    assert variable.default is None or type(variable.default) is variable.kind
    assert variable.meaning


def test_read_looks_at_the_process_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_PREFILL_TILE", "12")
    assert read("NSA_PREFILL_TILE") == 12
    assert raw("NSA_PREFILL_TILE") == "12"

    monkeypatch.delenv("NSA_PREFILL_TILE")
    assert read("NSA_PREFILL_TILE") == 0
    assert raw("NSA_PREFILL_TILE") is None


def test_a_name_outside_the_table_cannot_be_read() -> None:
    with pytest.raises(KeyError, match="NSA_NOPE"):
        read("NSA_NOPE", {"NSA_NOPE": "1"})


WRONG = {
    "NSA_STRICT_ASSERTS": ("2", "0 or 1"),
    "NSA_PREFILL_TILE": ("-1", "a whole number >= 0"),
    "NSA_ACCUM": ("1.5", "a whole number >= 0"),
    "NSA_LR": ("inf", "a number >= 0"),
    "NSA_ROPE_SCALE": ("nan", "a number >= 0"),
    "NSA_FORCE_BRANCH": ("window", "cmp or sel or win"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_value_that_does_not_parse_is_refused(name: str) -> None:
    text, allowed = WRONG[name]

    for refuses in (lambda environ: read(name, environ), check_environment):
        with pytest.raises(ConfigError) as caught:
            refuses({name: text})
        assert f"{name}={text!r}" in str(caught.value) and allowed in str(caught.value)


def test_an_unknown_name_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"NSA_SEQLEN='64'.*NSA_SEQ_LEN"):
        check_environment({"NSA_SEQLEN": "64"})


PLANNED = [v.name for v in TABLE.values() if v.honoured == "planned" and "NSA_" in v.name]


@pytest.mark.parametrize("name", PLANNED)
def test_a_switch_that_nothing_honours_is_refused_unless_at_its_default(name: str) -> None:
    variable = TABLE[name]
    default = str(int(bool(variable.default)) if variable.kind is bool else variable.default)
    others = {bool: str(1 - bool(variable.default)), int: "77", float: "77.5"}
    other = others.get(variable.kind) or (variable.choices or ("0:1",))[-1]

    check_environment({name: default})
    with pytest.raises(ConfigError, match=f"{name}=.*not supported by this version"):
        check_environment({name: other})


def test_names_of_others_are_left_alone() -> None:
    check_environment({"PORT": "http", "NP": "many", "HOME": "/", "NCCL_ALGO": "Ring"})


def test_in_effect_lists_what_differs_from_the_default() -> None:
    environ = {"NSA_LR": "0.1", "NSA_SEL_RANGES_V2": "1", "NCCL_ALGO": "Ring", "HOME": "/"}

    assert in_effect(environ) == {"NSA_LR": "0.1"}


OVERRIDES: dict[str, tuple[str, dict[str, Any]]] = {
    "NSA_SEQ_LEN": ("64", {"train.seq_len": 64}),
    "NSA_BATCH_SIZE": ("3", {"train.batch_size": 3}),
    "NSA_ACCUM": ("5", {"train.accumulate_grad_batches": 5}),
    "NSA_LR": ("0.5", {"train.lr": 0.5}),
    "NSA_ROPE_SCALE": ("8", {"model.rope_scale": 8.0}),
    "NSA_NO_GC": ("1", {"runtime.gradient_checkpointing": False, "runtime.gc_layers": ""}),
    "NSA_GC_RANGE": ("1:3", {"runtime.gradient_checkpointing": True, "runtime.gc_layers": "1:3"}),
}


@pytest.mark.parametrize("name", OVERRIDES)
def test_a_variable_wins_over_the_file(name: str, tmp_path: Path) -> None:
    text, expected = OVERRIDES[name]
    path = tmp_path / "mine.yaml"
    path.write_text('runtime: {gradient_checkpointing: true, gc_layers: "0:2"}', encoding="utf-8")

    container = to_container(load_config(path, environ={name: text}))

    for key, value in expected.items():
        group, _, field = key.partition(".")
        assert container[group][field] == value


def test_every_variable_that_sets_keys_is_tested_above() -> None:
    assert {v.name for v in TABLE.values() if v.sets} == OVERRIDES.keys()
    assert all(s.partition("=")[0] in known_keys() for v in TABLE.values() for s in v.sets)


def test_contradicting_variables_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"NSA_NO_GC=1 and NSA_GC_RANGE=0:2 contradict"):
        list(config_overrides({"NSA_NO_GC": "1", "NSA_GC_RANGE": "0:2"}))


def test_a_key_of_texts_changes_with_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("NSA_USE_FA2", "NSA_NVTX")
    key = texts_key(names)
    seen: dict[object, object] = {}
    for text in (None, "", "0", "ä"):
        for name in names:
            if text is not None:
                monkeypatch.setenv(name, text)
            assert seen.setdefault(key(), texts(names)) == texts(names)
    assert len(seen) == len(set(seen.values())) == 7
