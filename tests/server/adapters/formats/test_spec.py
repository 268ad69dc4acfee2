import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loralane_server.adapters.formats.base_shape import module_name
from loralane_server.adapters.formats.spec import (
    IMPLEMENTED,
    WITHOUT_EFFECT,
    AdapterSpec,
    parse_spec,
)
from loralane_server.errors import (
    AdapterCorrupt,
    AdapterError,
    AdapterIncompatible,
    AdapterTooLarge,
)
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from tests.server.adapters.samples import FUZZ


def spec_of(**fields: Any) -> AdapterSpec:
    return parse_spec(json.dumps({"peft_type": "LORA"} | fields).encode())


def test_what_is_not_said_has_the_defaults_of_peft() -> None:
    spec = spec_of()

    assert (spec.rank, spec.alpha, spec.use_rslora) == (
        LoraConfig().r,
        LoraConfig().lora_alpha,
        False,
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"r": 4, "lora_alpha": 16},
        {"r": 16, "lora_alpha": 16, "use_rslora": True},
        {"r": 4, "lora_alpha": 8, "rank_pattern": {"v_proj": 16}, "alpha_pattern": {"v_proj": 32}},
        {
            "r": 4,
            "lora_alpha": 16,
            "use_rslora": True,
            "rank_pattern": {"layers.1.self_attn.q_proj": 12, "q_proj": 2, "v_proj": 1},
            "alpha_pattern": {r".*\.layers\.1\..*(q_proj)$": 3, "model.layers.0.mlp.up_proj": 5},
        },
        {"rank_pattern": {"q_proj": 2, "layers.1.self_attn.q_proj": 12}},
        {"rank_pattern": {"proj": 3, "model.layers.0.mlp.down_proj": 6}, "lora_alpha": 0.5},
    ],
)
@pytest.mark.filterwarnings("ignore:The following:RuntimeWarning")  # PEFT on unused keys
def test_ranks_and_scales_are_those_of_peft(fields: dict[str, Any]) -> None:
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    )
    peft: Any = get_peft_model(model, LoraConfig(target_modules="all-linear", **fields))

    spec = spec_of(**fields)

    for layer in range(2):
        for module in ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"):
            name = module_name(layer, module)
            theirs = peft.base_model.model.get_submodule(name)
            assert spec.rank_of(name) == theirs.r["default"]
            assert spec.scale_of(name, spec.rank_of(name)) == theirs.scaling["default"]


def test_fields_without_effect_on_inference_are_ignored() -> None:
    spec = spec_of(
        base_model_name_or_path="/scratch/run7",
        lora_dropout=0.1,
        peft_version="99.0.0",
        runtime_config={"ephemeral_gpu_offload": False},
        target_modules="(q_proj",
        layers_to_transform=[1],
        eva_config={"rho": 2.0},
        future_note=None,
        use_dora=False,
        fan_in_fan_out=True,
        megatron_config={"hidden_size": 64},
        modules_to_save=[],
        trainable_token_indices=None,
        kasa_config=None,
    )

    assert spec == AdapterSpec()


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_initialisations_that_leave_the_base_alone_are_accepted(init: Any) -> None:
    assert spec_of(init_lora_weights=init) == AdapterSpec()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "IA3"),
        ("peft_type", None),
        ("task_type", "SEQ_CLS"),
        ("bias", "b_only"),
        ("bias", ["all"]),
        ("modules_to_save", ["score"]),
        ("modules_to_save", ["tokens"]),
        ("modules_to_save", ["lm_head", "model.norm"]),
        ("trainable_token_indices", {"wte": [1]}),
        ("trainable_token_indices", {"embed_tokens": [1], "model.embed_tokens": [2]}),
        ("layer_replication", [[0, 2]]),
        ("target_parameters", ["mlp.experts.gate_up_proj"]),
        ("use_bdlora", {"a": []}),
        ("use_bdlora", {}),
        ("kasa_config", {}),
        ("something_new", 0),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "lora_ga"),
        ("lora_alpha", 0),
        ("r", 0),
        ("r", -4),
        ("r", 10**4000),
        ("rank_pattern", {"q_proj": 2**40}),
        ("rank_pattern", {"(q+)+": 4}),
        ("alpha_pattern", {"q_proj": 0}),
        ("alpha_pattern", {f"key{i}": 1 for i in range(5000)}),
        ("rank_pattern", {f"{i}" + ".*" * 100: 1 for i in range(11)}),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(AdapterIncompatible, match=field):
        spec_of(**{field: value})


def test_what_else_an_adapter_changes_is_in_its_spec() -> None:
    spec = spec_of(
        bias="lora_only",
        use_dora=True,
        modules_to_save=["model.embed_tokens"],
        trainable_token_indices={"lm_head": [5, 2]},
        ensure_weight_tying=True,
    )

    assert spec == AdapterSpec(
        bias="lora_only",
        use_dora=True,
        tables=frozenset({"embed_tokens"}),
        tokens=(("lm_head", (5, 2)),),
        tied=True,
    )
    assert spec_of(trainable_token_indices=[4]).tokens == (("embed_tokens", (4,)),)
    assert spec_of(lora_bias=True).lora_bias


def test_dora_and_a_bias_of_b_exclude_each_other_as_in_peft() -> None:
    with pytest.raises(AdapterIncompatible, match="use_dora and lora_bias"):
        spec_of(use_dora=True, lora_bias=True)
    with pytest.raises(ValueError, match="not supported for DoRA"):
        LoraConfig(use_dora=True, lora_bias=True)


#: A value that turns each field on that is refused, as it stands in a file.
TURNED_ON: dict[str, Any] = {
    "alora_invocation_tokens": [1, 2],
    "arrow_config": {"top_k": 3},
    "kasa_config": {},
    "layer_replication": [[0, 2], [1, 3]],
    "monteclora_config": {"num_samples": 8},
    "target_parameters": ["mlp.experts.down_proj"],
    "use_bdlora": {"nblocks": 2},
    "use_qalora": True,
    "velora_config": {"num_groups": 64},
}


def test_every_field_of_pefts_config_is_decided() -> None:
    known = {field.name for field in dataclasses.fields(LoraConfig)}

    assert known == (IMPLEMENTED | WITHOUT_EFFECT | TURNED_ON.keys())
    assert not IMPLEMENTED & WITHOUT_EFFECT


@pytest.mark.parametrize("field", TURNED_ON)
def test_a_field_that_is_neither_implemented_nor_without_effect_is_refused(field: str) -> None:
    assert spec_of(**{field: None}) == AdapterSpec()
    with pytest.raises(AdapterIncompatible, match=f"'{field}' is not implemented"):
        spec_of(**{field: TURNED_ON[field]})


def test_the_defaults_that_peft_saves_are_accepted(tmp_path: Path) -> None:
    LoraConfig(target_modules=["q_proj"]).save_pretrained(tmp_path)

    spec = parse_spec((tmp_path / "adapter_config.json").read_bytes())

    assert spec == AdapterSpec()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b'{"r": 4,',
        b"[]",
        b'"text"',
        b"\xef\xbb\xbf{}",
        b"\xff\xfe{}",
        b'{"a":' * 100_000,
        b'{"r": "4", "peft_type": "LORA"}',
        b'{"r": 4.0, "peft_type": "LORA"}',
        b'{"use_rslora": 1, "peft_type": "LORA"}',
        b'{"rank_pattern": [1], "peft_type": "LORA"}',
        b'{"modules_to_save": [1], "peft_type": "LORA"}',
        b'{"trainable_token_indices": 7, "peft_type": "LORA"}',
        b'{"trainable_token_indices": ["7"], "peft_type": "LORA"}',
        b'{"trainable_token_indices": [-1], "peft_type": "LORA"}',
        b'{"trainable_token_indices": [true], "peft_type": "LORA"}',
        b'{"trainable_token_indices": {"lm_head": [7, 7]}, "peft_type": "LORA"}',
        b" " * (1 << 20) + b"{}",
    ],
)
def test_a_broken_config_is_corrupt_and_named(raw: bytes) -> None:
    with pytest.raises(AdapterCorrupt, match=r"adapter_config\.json"):
        parse_spec(raw)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "1" + "0" * 400])
def test_a_number_that_is_not_finite_is_corrupt(number: str) -> None:
    with pytest.raises(AdapterCorrupt, match="lora_alpha"):
        parse_spec(f'{{"peft_type": "LORA", "lora_alpha": {number}}}'.encode())


def test_negative_and_fractional_alphas_are_numbers_like_any_other() -> None:
    assert spec_of(r=4, lora_alpha=-8).scale_of("q_proj", 4) == -2.0
    assert spec_of(r=4, lora_alpha=0.5).scale_of("q_proj", 4) == 0.125
    assert spec_of(r=2, lora_alpha=1, use_rslora=True).scale_of("q", 2) == 1 / math.sqrt(2)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JSON = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(max_size=8), SCALARS)
FIELDS = st.sampled_from(
    "peft_type r lora_alpha rank_pattern alpha_pattern use_rslora bias x modules_to_save "
    "trainable_token_indices lora_bias use_dora".split()
)


@FUZZ
@given(st.binary(max_size=200))
def test_no_bytes_make_it_raise_anything_else(raw: bytes) -> None:
    try:
        parse_spec(raw)
    except AdapterError as error:
        error.to_proto()


@FUZZ
@given(st.dictionaries(FIELDS, JSON))
def test_no_values_make_it_raise_anything_else(fields: dict[str, Any]) -> None:
    try:
        spec_of(**fields)
    except AdapterError as error:
        error.to_proto()


def test_a_list_of_token_ids_has_a_bound() -> None:
    most = list(range(1 << 16))

    assert spec_of(trainable_token_indices=most).tokens == (("embed_tokens", tuple(most)),)
    with pytest.raises(
        AdapterTooLarge, match="trainable_token_indices of 'embed_tokens' holds more than 65536"
    ):
        spec_of(trainable_token_indices=[*most, 1 << 16])
