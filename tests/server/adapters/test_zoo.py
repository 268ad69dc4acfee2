"""Adapters as they are found in the wild, broken or merely different, through a resolution."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from loralane_server.adapters.index import AdapterIndex
from loralane_server.errors import (
    AdapterCorrupt,
    AdapterError,
    AdapterIncompatible,
    AdapterNotFound,
    AdapterTooLarge,
)

from tests.server.adapters.samples import (
    CONFIG,
    NORM,
    Stored,
    adapter_files,
    lora,
    safetensors,
    store_at,
    write,
)

ROOT = "base_model.model.model.layers.0.self_attn.q_proj"


def zeros(name: str, *shape: int, dtype: str = "F32") -> dict[str, Stored]:
    width = {"F32": 4, "I8": 1, "F64": 8, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}[dtype]
    size = width
    for dim in shape:
        size *= dim
    return {name: (dtype, shape, bytes(size))}


def pair(
    module: str, a: tuple[int, ...], b: tuple[int, ...], dtype: str = "F32"
) -> dict[str, Stored]:
    return zeros(f"{module}.lora_A.weight", *a, dtype=dtype) | zeros(
        f"{module}.lora_B.weight", *b, dtype=dtype
    )


def sharded(extra: dict[str, str] | None = None, drop: str = "") -> dict[str, bytes]:
    shards = {f"adapter_model-0000{n + 1}-of-00002.safetensors": lora(layers=[n]) for n in (0, 1)}
    weight_map = {name: file for file, tensors in shards.items() for name in tensors} | (
        extra or {}
    )
    files = {file: safetensors(tensors) for file, tensors in shards.items() if file != drop}
    files["adapter_model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    return {"adapter_config.json": json.dumps(CONFIG).encode()} | files


def only(**files: bytes) -> dict[str, bytes]:
    return {"adapter_config.json": json.dumps(CONFIG).encode()} | {
        name.replace("__", "."): content for name, content in files.items()
    }


def resolve(tmp_path: Path, files: dict[str, bytes], **settings: Any) -> AdapterIndex:
    folder = write(tmp_path / "roots" / "a", files)
    store = store_at(folder.parent, **settings)
    try:
        return store.resolve("a").result()
    finally:
        store.close()


REFUSED: dict[str, tuple[dict[str, bytes], type[AdapterError], str]] = {
    "load-modules-disjoint": (
        adapter_files(pair("base_model.model.transformer.h.0.attn.c_attn", (4, 64), (192, 4))),
        AdapterIncompatible,
        "c_attn",
    ),
    "load-partial-match": (adapter_files(lora(layers=(0, 7))), AdapterIncompatible, r"layers\.7"),
    "load-two-spellings-collide": (
        adapter_files(lora() | lora(template=NORM.replace(".weight", ".default.weight"), seed=2)),
        AdapterIncompatible,
        "q_proj",
    ),
    "load-missing-b": (
        adapter_files({k: v for k, v in lora().items() if "1.self_attn.v_proj.lora_B" not in k}),
        AdapterIncompatible,
        r"layers\.1\.self_attn\.v_proj",
    ),
    "load-unknown-fields": (
        adapter_files(use_bdlora={"a": ["q"]}),
        AdapterIncompatible,
        "use_bdlora",
    ),
    "load-r-disagrees": (adapter_files(r=16), AdapterIncompatible, "rank 4.*r = 16"),
    "load-other-peft-types": (
        adapter_files(peft_type="VERA"),
        AdapterIncompatible,
        "peft_type.*VERA",
    ),
    "load-seq-cls": (adapter_files(task_type="SEQ_CLS"), AdapterIncompatible, "SEQ_CLS"),
    "load-pickle-only": (only(adapter_model__bin=b"\x80\x04."), AdapterIncompatible, "safetensors"),
    "load-no-weights": (only(), AdapterNotFound, r"adapter_model\.safetensors is missing"),
    "load-empty-weights": (adapter_files({}), AdapterCorrupt, "no tensors"),
    "load-shard-missing": (
        sharded(drop="adapter_model-00002-of-00002.safetensors"),
        AdapterNotFound,
        r"adapter_model-00002-of-00002\.safetensors is missing",
    ),
    "load-shard-map-wrong": (
        sharded(extra={next(iter(lora())): "adapter_model-00002-of-00002.safetensors"}),
        AdapterCorrupt,
        "weight_map",
    ),
    "load-torchtune-names": (
        adapter_files(lora(template="layers.{layer}.attn.{module}.lora_{ab_lower}.weight")),
        AdapterIncompatible,
        "lora_a",
    ),
    "load-mlx-names": (
        only(adapters__safetensors=b""),
        AdapterIncompatible,
        "adapters.safetensors",
    ),
    "load-diffusers-alpha": (
        adapter_files(zeros("lora_unet_q.lora_down.weight", 4, 64) | zeros("lora_unet_q.alpha")),
        AdapterIncompatible,
        "lora_down",
    ),
    "load-resized-vocab": (
        adapter_files(modules_to_save=["lm_head"]),
        AdapterIncompatible,
        "modules_to_save",
    ),
    "load-token-adapter": (
        adapter_files(trainable_token_indices=[10]),
        AdapterIncompatible,
        "trainable_tokens",
    ),
    "load-norm-tensors": (
        adapter_files(lora() | zeros("base_model.model.model.layers.0.input_layernorm.weight", 64)),
        AdapterIncompatible,
        "input_layernorm",
    ),
    "load-weight-spelling": (
        adapter_files(lora(template=NORM.replace("{module}", "{module}.weight"))),
        AdapterIncompatible,
        r"weight\.lora_A",
    ),
    "load-wrong-block": (
        adapter_files(pair(ROOT.replace("self_attn", "mlp"), (4, 64), (64, 4))),
        AdapterIncompatible,
        r"mlp\.q_proj",
    ),
    "load-layer-spelling": (
        adapter_files(pair(ROOT.replace(".0.", ".00."), (4, 64), (64, 4))),
        AdapterIncompatible,
        "00",
    ),
    "math-rank-zero": (
        adapter_files(pair(ROOT, (0, 64), (64, 0)), r=0),
        AdapterIncompatible,
        "rank r must",
    ),
    "math-fused-on-split": (
        adapter_files(
            pair("base_model.model.model.layers.0.self_attn.qkv_proj", (4, 64), (128, 4))
        ),
        AdapterIncompatible,
        "qkv_proj",
    ),
    "math-dora": (adapter_files(use_dora=True), AdapterIncompatible, "use_dora"),
    "math-dora-flagless": (
        adapter_files(lora() | zeros(f"{ROOT}.lora_magnitude_vector", 64)),
        AdapterIncompatible,
        "lora_magnitude_vector",
    ),
    "math-lora-bias": (adapter_files(lora_bias=True), AdapterIncompatible, "lora_bias"),
    "math-bias-lora-only": (adapter_files(bias="lora_only"), AdapterIncompatible, "bias"),
    "math-embedding-lora": (
        adapter_files(
            lora() | zeros("base_model.model.model.embed_tokens.lora_embedding_A", 4, 260)
        ),
        AdapterIncompatible,
        "embed_tokens",
    ),
    "math-tied-lm-head": (
        adapter_files(pair("base_model.model.lm_head", (4, 64), (260, 4))),
        AdapterIncompatible,
        "lm_head",
    ),
    "math-adalora": (
        adapter_files(
            {k.removesuffix(".weight"): v for k, v in pair(ROOT, (4, 64), (64, 4)).items()}
            | zeros(f"{ROOT}.lora_E", 4, 1)
        ),
        AdapterIncompatible,
        "lora_E",
    ),
    "math-moe-target-params": (
        adapter_files(target_parameters=["mlp.experts"]),
        AdapterIncompatible,
        "target_parameters",
    ),
    "math-wrong-shape-big": (
        adapter_files(pair(ROOT, (4, 128), (128, 4))),
        AdapterIncompatible,
        r"shape \(r, 64\).*\[4, 128\]",
    ),
    "math-wrong-shape-swap": (
        adapter_files(pair(ROOT, (64, 4), (4, 64))),
        AdapterIncompatible,
        "shape",
    ),
    "math-wrong-shape-rows": (
        adapter_files(pair(ROOT.replace("q_proj", "v_proj"), (4, 64), (64, 4))),
        AdapterIncompatible,
        "shape",
    ),
    "math-wrong-shape-ranks": (
        adapter_files(pair(ROOT, (4, 64), (64, 8))),
        AdapterIncompatible,
        "shape",
    ),
    "math-wrong-shape-1d": (
        adapter_files(pair(ROOT, (256,), (256,))),
        AdapterIncompatible,
        "shape",
    ),
    "math-wrong-shape-0d": (adapter_files(pair(ROOT, (), ())), AdapterIncompatible, "shape"),
    "math-dtypes-i8": (
        adapter_files(pair(ROOT, (4, 64), (64, 4), dtype="I8")),
        AdapterIncompatible,
        "I8",
    ),
    "path-index-escape": (
        sharded(extra={"x": "../secret/adapter_model.safetensors"}),
        AdapterCorrupt,
        "weight_map.*path",
    ),
    "path-index-absolute": (
        sharded(extra={"x": "/etc/passwd"}),
        AdapterCorrupt,
        "weight_map.*path",
    ),
    "cfg-missing": (
        {"adapter_model.safetensors": b""},
        AdapterNotFound,
        r"adapter_config\.json is missing",
    ),
    "st-index-is-no-json": (
        only(adapter_model__safetensors__index__json=b"["),
        AdapterCorrupt,
        r"index\.json",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_served_exactly_is_refused_by_name(case: str, tmp_path: Path) -> None:
    files, error, words = REFUSED[case]

    with pytest.raises(error, match=words) as caught:
        resolve(tmp_path, files)

    assert str(tmp_path) not in caught.value.message
    caught.value.to_proto()


TEMPLATES = {
    "load-prefix-nomatch": NORM.replace("model.layers", "language_model.model.layers"),
    "load-missing-inner-model": "base_model.model.layers.{layer}.{block}.{module}.lora_{ab}.weight",
    "load-no-prefix": "model.layers.{layer}.{block}.{module}.lora_{ab}.weight",
    "load-inmemory-names": NORM.replace(".weight", ".default.weight"),
    "load-compiled-names": "base_model.model._orig_mod.model.layers.{layer}._fsdp_wrapped_module."
    "{block}.{module}.lora_{ab}.weight",
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_other_spellings_are_served_when_every_key_is_one_target(case: str, tmp_path: Path) -> None:
    index = resolve(tmp_path, adapter_files(lora(template=TEMPLATES[case])))

    assert set(index.targets) == {(n, m) for n in (0, 1) for m in ("q_proj", "v_proj")}


def test_one_key_that_maps_nowhere_spoils_all(tmp_path: Path) -> None:
    odd = zeros(
        "base_model.model.model.vision_tower.layers.0.self_attn.q_proj.lora_A.weight", 4, 64
    )

    with pytest.raises(AdapterIncompatible, match="1 tensors map to no") as caught:
        resolve(tmp_path, adapter_files(lora() | odd))

    assert caught.value.tensors == tuple(odd)


def test_at_most_five_keys_are_listed(tmp_path: Path) -> None:
    with pytest.raises(AdapterIncompatible, match="8 tensors") as caught:
        resolve(tmp_path, adapter_files(lora(template="x" + NORM)))

    assert len(caught.value.tensors) == 5


def test_shards_are_one_adapter(tmp_path: Path) -> None:
    index = resolve(tmp_path, sharded())

    assert [target.a.file[14:19] for layer in index.layers for target in layer] == [
        "00001", "00001", "00002", "00002",
    ]  # fmt: skip


def test_an_index_says_everything_about_the_adapter(tmp_path: Path) -> None:
    tensors = lora(["q_proj"], [0], rank=4) | lora(["q_proj", "down_proj"], [1], rank=12)

    index = resolve(
        tmp_path,
        adapter_files(
            tensors, lora_alpha=16, rank_pattern={"layers.1..*": 12}, target_modules="all-linear"
        ),
    )

    assert index.reference == "a"
    assert index.rank == 12
    assert index.modules == ("down_proj", "q_proj")
    assert index.bytes == sum(len(content) for _, _, content in tensors.values())
    assert [(t.module, t.rank, t.scale) for t in index.layer(0)] == [("q_proj", 4, 4.0)]
    assert [(t.module, t.rank) for t in index.layer(1)] == [("down_proj", 12), ("q_proj", 12)]
    assert index.targets[1, "q_proj"].scale == 16 / 12


def test_the_digest_changes_with_config_header_and_bytes(tmp_path: Path) -> None:
    digests = {
        resolve(tmp_path / name, files).digest
        for name, files in {
            "one": adapter_files(),
            "alpha": adapter_files(lora_alpha=9),
            "layers": adapter_files(lora(layers=[1])),
            "values": adapter_files(lora(seed=2)),
        }.items()
    }

    assert len(digests) == 4
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests)


def test_a_rank_above_the_shards_lanes_is_too_large(tmp_path: Path) -> None:
    with pytest.raises(AdapterTooLarge, match="--lanes"):
        resolve(tmp_path, adapter_files(lora(rank=64), r=64), max_rank=32)


def test_a_rank_above_the_limit_is_too_large_whatever_the_lanes(tmp_path: Path) -> None:
    with pytest.raises(AdapterTooLarge, match="256"):
        resolve(tmp_path, adapter_files(lora(rank=264), r=264), max_rank=4096)


@pytest.mark.parametrize("rank", [1, 3, 8, 64, 256])
def test_every_rank_up_to_the_limit_is_served(rank: int, tmp_path: Path) -> None:
    assert resolve(tmp_path, adapter_files(lora(rank=rank), r=rank)).rank == rank
