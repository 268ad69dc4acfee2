import json
import logging
from pathlib import Path
from typing import Any

import pytest
from loralane_server.adapters.formats.hints import oddities

from tests.server.adapters.samples import adapter_files, index_at, lora, store_at, write


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, []),
        ({"base_model_name_or_path": None}, []),
        ({"base_model_name_or_path": "/home/me/Tiny/"}, []),
        ({"target_modules": None}, []),
        ({"target_modules": ".*"}, []),
        ({"base_model_name_or_path": "org/tiny-bnb-4bit"}, ["was trained on 'org/tiny-bnb-4bit'"]),
        ({"base_model_name_or_path": "a\nb"}, ["was trained on 'a\\nb'"]),
        ({"target_modules": ["up_proj"]}, ["has tensors for q_proj, v_proj"]),
        ({"target_modules": ["self_attn.v_proj"]}, ["has tensors for q_proj"]),
        ({"target_modules": ["qkv_proj"]}, []),
        ({"target_modules": ["all-linear"]}, []),
    ],
)
def test_what_looks_odd_is_told_and_nothing_else(
    tmp_path: Path, changes: dict[str, Any], told: list[str]
) -> None:
    index = index_at(write(tmp_path / "a", adapter_files()))
    plain = {"base_model_name_or_path": "org/tiny", "target_modules": ["q_proj", "v_proj"]}

    found = oddities(json.dumps(plain | changes).encode(), index, "models/tiny")

    assert len(found) == len(told)
    assert all(words in sentence for words, sentence in zip(told, found, strict=True))


def test_tables_need_no_target_module(tmp_path: Path) -> None:
    head = {"base_model.model.lm_head.weight": ("F32", (260, 64), bytes(4 * 260 * 64))}
    files = adapter_files(lora() | head, modules_to_save=["lm_head"])

    index = index_at(write(tmp_path / "a", files))

    assert oddities(files["adapter_config.json"], index, "") == []


def test_an_adapter_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = adapter_files()
    config = json.loads(files["adapter_config.json"]) | {"target_modules": ["up_proj"]}
    write(tmp_path / "a", files | {"adapter_config.json": json.dumps(config).encode()})
    store = store_at(tmp_path)

    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            store.resolve("a").result()

    store.close()
    (told,) = (record.getMessage() for record in caplog.records)
    assert told.startswith("adapter 'a' has tensors for q_proj, v_proj, which target_modules")
