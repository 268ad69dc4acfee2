"""Adapters as they are found in the wild, broken or merely different, from folder to index."""

import json
import re
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from loralane_server.adapters.formats.base_shape import BaseShape
from loralane_server.adapters.formats.headers import FileHeader, TensorRef
from loralane_server.adapters.formats.index import AdapterIndex, build_index
from loralane_server.adapters.formats.spec import MAX_RANK, parse_spec
from loralane_server.adapters.sources.located import Located
from loralane_server.device.seam import ENDS
from loralane_server.errors import (
    AdapterCorrupt,
    AdapterError,
    AdapterIncompatible,
    AdapterNotFound,
    AdapterTooLarge,
)

from tests.server.adapters.samples import (
    BASE,
    CONFIG,
    NORM,
    Stored,
    adapter_files,
    index_at,
    lora,
    safetensors,
    write,
)

ROOT = "base_model.model.model.layers.0.self_attn.q_proj"
EMBED = "base_model.model.model.embed_tokens"
HEAD = "base_model.model.lm_head"
TOKENS = f"{EMBED}.token_adapter.trainable_tokens_delta"


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


def resolve(
    tmp_path: Path, files: dict[str, bytes], *, base: BaseShape = BASE, max_rank: int = MAX_RANK
) -> AdapterIndex:
    return index_at(write(tmp_path / "a", files), base, max_rank)


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
        adapter_files(
            lora() | zeros(f"{HEAD}.weight", 264, 64), modules_to_save=["embed_tokens", "lm_head"]
        ),
        AdapterIncompatible,
        "modules_to_save names embed_tokens",
    ),
    "load-resized-head": (
        adapter_files(lora() | zeros(f"{HEAD}.weight", 264, 64), modules_to_save=["lm_head"]),
        AdapterIncompatible,
        r"modules_to_save.*\[260, 64\].*\[264, 64\].*lm_head\.weight",
    ),
    "load-resized-copy": (
        adapter_files(lora() | zeros(f"{EMBED}.base_layer.weight", 264, 64)),
        AdapterIncompatible,
        r"\[264, 64\].*embed_tokens\.base_layer\.weight",
    ),
    "load-resized-embedding-lora": (
        adapter_files(
            zeros(f"{EMBED}.lora_embedding_A", 4, 264) | zeros(f"{EMBED}.lora_embedding_B", 64, 4)
        ),
        AdapterIncompatible,
        r"shape \(r, 260\).*\[4, 264\]",
    ),
    "load-swapped-embedding-lora": (
        adapter_files(
            zeros(f"{EMBED}.lora_embedding_A", 64, 4) | zeros(f"{EMBED}.lora_embedding_B", 4, 260)
        ),
        AdapterIncompatible,
        "shape",
    ),
    "load-saved-norm": (
        adapter_files(modules_to_save=["norm"]),
        AdapterIncompatible,
        "modules_to_save names 'norm'",
    ),
    "load-token-adapter-missing": (
        adapter_files(trainable_token_indices=[10]),
        AdapterIncompatible,
        "trainable_token_indices.*trainable_tokens_delta",
    ),
    "load-token-adapter-unsaid": (
        adapter_files(lora() | zeros(TOKENS, 1, 64)),
        AdapterIncompatible,
        "trainable_token_indices.*trainable_tokens_delta",
    ),
    "load-token-adapter-count": (
        adapter_files(lora() | zeros(TOKENS, 3, 64), trainable_token_indices=[10, 11]),
        AdapterIncompatible,
        r"trainable_token_indices: 2 rows.*\[3, 64\]",
    ),
    "load-token-adapter-past-the-end": (
        adapter_files(lora() | zeros(TOKENS, 2, 64), trainable_token_indices=[10, 260]),
        AdapterIncompatible,
        "token 260 is not in this base's vocabulary of 260",
    ),
    "load-tokens-of-a-saved-table": (
        adapter_files(
            lora() | zeros(TOKENS, 1, 64) | zeros(f"{EMBED}.weight", 260, 64),
            trainable_token_indices=[10],
            modules_to_save=["embed_tokens"],
        ),
        AdapterIncompatible,
        "embed_tokens is changed in more than one way",
    ),
    "load-two-names": (
        adapter_files(
            lora(["q_proj"], template=NORM.replace(".weight", ".one.weight"))
            | lora(["v_proj"], template=NORM.replace(".weight", ".two.weight"))
        ),
        AdapterIncompatible,
        "more than one adapter",
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
    "math-fused-and-split": (
        adapter_files(
            lora(["k_proj"]) | pair(ROOT.replace("q_proj", "qkv_proj"), (4, 64), (128, 4))
        ),
        AdapterIncompatible,
        r"two tensors.*k_proj.*qkv_proj",
    ),
    "math-fused-shape": (
        adapter_files(pair(ROOT.replace("q_proj", "qkv_proj"), (4, 64), (192, 4))),
        AdapterIncompatible,
        r"qkv_proj: the base takes .*\(128, r\)",
    ),
    "math-dora-missing": (
        adapter_files(use_dora=True),
        AdapterIncompatible,
        "use_dora.*no lora_magnitude_vector",
    ),
    "math-dora-flagless": (
        adapter_files(lora() | zeros(f"{ROOT}.lora_magnitude_vector", 64)),
        AdapterIncompatible,
        "lora_magnitude_vector.*use_dora",
    ),
    "math-dora-shape": (
        adapter_files(
            lora(["q_proj"], [0]) | zeros(f"{ROOT}.lora_magnitude_vector", 1, 64), use_dora=True
        ),
        AdapterIncompatible,
        r"magnitude of shape \(64,\), found \[1, 64\]",
    ),
    "math-dora-embedding": (
        adapter_files(
            zeros(f"{EMBED}.lora_embedding_A", 4, 260)
            | zeros(f"{EMBED}.lora_embedding_B", 64, 4)
            | zeros(f"{EMBED}.lora_magnitude_vector", 64),
            use_dora=True,
        ),
        AdapterIncompatible,
        "use_dora.*embed_tokens",
    ),
    "math-lora-bias-missing": (
        adapter_files(lora_bias=True),
        AdapterIncompatible,
        "lora_bias.*no bias of lora_B",
    ),
    "math-lora-bias-flagless": (
        adapter_files(lora() | zeros(f"{ROOT}.lora_B.bias", 64)),
        AdapterIncompatible,
        "lora_bias",
    ),
    "math-lora-bias-alone": (
        adapter_files(lora(["v_proj"]) | zeros(f"{ROOT}.lora_B.bias", 64), lora_bias=True),
        AdapterIncompatible,
        "q_proj has no lora_A and lora_B",
    ),
    "math-bias-lora-only": (
        adapter_files(lora() | zeros(f"{ROOT}.base_layer.bias", 64), bias="lora_only"),
        AdapterIncompatible,
        r"bias of model\.layers\.0\.self_attn\.q_proj, which has none",
    ),
    "math-norm-bias": (
        adapter_files(lora() | zeros("base_model.model.model.norm.bias", 64), bias="all"),
        AdapterIncompatible,
        "norm.bias",
    ),
    "math-embedding-lora-half": (
        adapter_files(lora() | zeros(f"{EMBED}.lora_embedding_A", 4, 260)),
        AdapterIncompatible,
        r"embed_tokens has no lora_B",
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
    "load-other-adapter-name": NORM.replace(".weight", ".sql-v2.weight"),
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


BIASED = replace(BASE, biased=frozenset({"q_proj", "k_proj", "v_proj"}))
TIED = replace(BASE, tied_head=True)
REFUSED_ELSEWHERE: dict[str, tuple[BaseShape, dict[str, bytes], str]] = {
    "bias-flagless": (
        BIASED,
        adapter_files(lora() | zeros(f"{ROOT}.base_layer.bias", 64)),
        "config's bias is 'none'",
    ),
    "bias-lora_only-lost": (
        BIASED,
        adapter_files(lora(["q_proj"], [0]), bias="lora_only"),
        "lacks the trained bias of.*q_proj",
    ),
    "bias-all-lost": (
        BIASED,
        adapter_files(lora(["q_proj"], [0]) | zeros(f"{ROOT}.base_layer.bias", 64), bias="all"),
        r"lacks the trained bias of.*layers\.0\.self_attn\.k_proj",
    ),
    "bias-two-spellings": (
        BIASED,
        adapter_files(
            lora() | zeros(f"{ROOT}.base_layer.bias", 64) | zeros(f"{ROOT}.bias", 64), bias="all"
        ),
        "two tensors are the same target",
    ),
    "tying-half-saved": (
        TIED,
        adapter_files(
            lora() | zeros(f"{HEAD}.weight", 260, 64),
            modules_to_save=["lm_head"],
            ensure_weight_tying=True,
        ),
        "ensure_weight_tying.*lm_head",
    ),
    "tying-tokens-and-head": (
        TIED,
        adapter_files(
            lora() | zeros(TOKENS, 1, 64) | pair(HEAD, (4, 64), (260, 4)),
            trainable_token_indices=[3],
        ),
        "tied lm_head.*another way",
    ),
    "no-ends": (
        replace(BASE, vocab=0, hidden=0),
        adapter_files(pair(HEAD, (4, 64), (260, 4))),
        "lm_head",
    ),
}


@pytest.mark.parametrize("case", REFUSED_ELSEWHERE)
def test_what_other_bases_cannot_serve_exactly_is_refused_by_name(
    case: str, tmp_path: Path
) -> None:
    base, files, words = REFUSED_ELSEWHERE[case]

    with pytest.raises(AdapterIncompatible, match=words):
        resolve(tmp_path, files, base=base)


def unwritten(shapes: dict[str, tuple[int, ...]], **fields: Any) -> Located:
    """An adapter of float32 tensors that are on no disk: only their header exists."""
    refs: list[TensorRef] = []
    for name, shape in shapes.items():
        begin = refs[-1].end if refs else 100
        refs.append(TensorRef("f", name, "F32", shape, begin, begin + 4 * prod(shape)))
    header = FileHeader("f", refs[-1].end, tuple(refs), b"")
    config = json.dumps(CONFIG | fields).encode()
    return Located("a", "local", config, (header,), (), Path, lambda: True)


@pytest.mark.parametrize(
    ("shapes", "fields", "tied"),
    [
        ({f"{HEAD}.weight": (300_000, 64)}, {"modules_to_save": ["lm_head"]}, False),
        ({TOKENS: (3000, 3200)}, {"trainable_token_indices": list(range(3000))}, True),
    ],
)
def test_tables_above_the_budget_are_too_large(
    shapes: dict[str, tuple[int, ...]], fields: dict[str, Any], tied: bool
) -> None:
    located = unwritten(shapes, **fields)
    spec = parse_spec(located.config)
    ((_, hidden),) = shapes.values()
    base = replace(BASE, vocab=300_000, hidden=hidden, tied_head=tied)

    with pytest.raises(AdapterTooLarge, match=r"76800000 bytes.*67108864 \(64 MiB\)") as caught:
        build_index(spec, located, base)

    assert caught.value.tensors[0] == next(iter(shapes))
    assert build_index(spec, located, replace(base, dtype="bfloat16")).tables.replaced


def test_a_rank_that_a_pattern_asks_for_is_refused_by_the_pattern(tmp_path: Path) -> None:
    files = adapter_files(lora(rank=4), rank_pattern={"v_proj": 6})

    with pytest.raises(AdapterIncompatible, match=r"v_proj: .* rank 4, .* r = 6 in rank_pattern: "):
        resolve(tmp_path, files)


def test_at_most_five_keys_are_listed(tmp_path: Path) -> None:
    with pytest.raises(AdapterIncompatible, match="8 tensors") as caught:
        resolve(tmp_path, adapter_files(lora(template="x" + NORM)))

    assert len(caught.value.tensors) == 5


def test_shards_are_one_adapter(tmp_path: Path) -> None:
    index = resolve(tmp_path, sharded())

    files = [{ref.file[14:19] for t in layer for ref in t.refs} for layer in index.layers]
    assert files == [{"00001"}, {"00002"}]


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
    assert index.ends == ()
    assert index.is_plain


def test_an_index_says_what_the_ends_hold(tmp_path: Path) -> None:
    tensors = lora(["q_proj"], [0]) | pair(HEAD, (12, 64), (260, 12)) | zeros(TOKENS, 2, 64)

    index = resolve(
        tmp_path,
        adapter_files(
            tensors, rank_pattern={"lm_head": 12}, trainable_token_indices={"embed_tokens": [9, 4]}
        ),
    )

    assert index.rank == 12
    assert index.modules == ("embed_tokens", "lm_head", "q_proj")
    assert [(t.module, t.rank, t.scale) for t in index.layer(ENDS)] == [("lm_head", 12, 8 / 12)]
    assert [(t.module, t.ids) for t in index.tables.replaced] == [("embed_tokens", (9, 4))]
    assert not index.is_plain


@pytest.mark.parametrize(
    ("tensor", "fields"),
    [
        ("lora_B.bias", {"lora_bias": True}),
        ("lora_magnitude_vector", {"use_dora": True}),
        ("base_layer.bias", {"bias": "lora_only"}),
    ],
)
def test_an_adapter_with_more_than_a_and_b_is_not_plain(
    tensor: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    tensors = lora(["q_proj"], [0]) | zeros(f"{ROOT}.{tensor}", 64)

    index = resolve(tmp_path, adapter_files(tensors, **fields), base=BIASED)

    assert not index.is_plain
    assert len(index.targets) == 1


def test_an_adapter_without_lora_still_has_a_rank_for_its_lane(tmp_path: Path) -> None:
    index = resolve(
        tmp_path,
        adapter_files(zeros(f"{HEAD}.weight", 260, 64), modules_to_save=["lm_head"]),
    )

    assert (index.rank, index.targets, index.modules) == (1, {}, ("lm_head",))


def test_fused_names_are_the_parts_with_rank_and_scale_of_the_fused_name(tmp_path: Path) -> None:
    tensors = pair(ROOT.replace("q_proj", "qkv_proj"), (6, 64), (128, 6)) | pair(
        ROOT.replace("self_attn.q_proj", "mlp.gate_up_proj"), (4, 64), (256, 4)
    )

    index = resolve(
        tmp_path,
        adapter_files(tensors, rank_pattern={"qkv_proj": 6}, alpha_pattern={"qkv_proj": 3}),
    )

    rows = {t.module: (t.rank, t.scale, t.b and (t.b.begin, t.b.end)) for t in index.layer(0)}
    assert rows == {
        "q_proj": (6, 0.5, (0, 64)),
        "k_proj": (6, 0.5, (64, 96)),
        "v_proj": (6, 0.5, (96, 128)),
        "gate_proj": (4, 2.0, (0, 128)),
        "up_proj": (4, 2.0, (128, 256)),
    }
    assert index.is_plain


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
