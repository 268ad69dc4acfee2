"""A shard on XLA refuses adapters that it would apply in part, when they are named."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from loralane_server.assembly import DEMO, find_model, open_store
from loralane_server.config import ShardConfig
from loralane_server.errors import AdapterIncompatible
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM


def save_adapter(folder: Path, **fields: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO / "model")
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], **fields)
    adapted: Any = get_peft_model(model, config)
    adapted.save_pretrained(folder)


def test_dora_and_whole_tables_are_refused_and_plain_lora_is_not(tmp_path: Path) -> None:
    save_adapter(tmp_path / "plain")
    save_adapter(tmp_path / "dora", use_dora=True)
    save_adapter(tmp_path / "head", modules_to_save=["lm_head"])
    named = tuple((folder.name, str(folder)) for folder in tmp_path.iterdir())
    store = open_store(ShardConfig(device="xla", adapters=named), find_model(None))

    assert store.resolve("plain").result().rank == 4
    for name in ("dora", "head"):
        with pytest.raises(AdapterIncompatible, match="--device cpu does"):
            store.resolve(name).result()
    store.close()


def test_a_device_that_is_not_there_is_refused_with_what_to_set() -> None:
    module = [sys.executable, "-m", "loralane_server", "shard"]
    command = [*module, str(DEMO / "model"), "--device=xla", "--listen=127.0.0.1:0"]
    env = {**os.environ, "PJRT_DEVICE": "elsewhere"}

    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    assert run.returncode == 1
    told = run.stderr.splitlines()[-1]
    assert told.startswith("loralane: --device xla finds no device with PJRT_DEVICE=elsewhere")
    assert told.endswith("set PJRT_DEVICE to TPU or CPU, or use --device cpu")
