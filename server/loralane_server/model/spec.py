"""What a base model is: config.json read into one frozen record, or refused by name.

Five families share one decoder; they differ in four switches (biases, q/k norm, head tying, fused
weights), which is all that `ModelSpec` keeps of the family. A field that would change the maths and
is not implemented is an error here, before a single weight is read.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from loralane_server.errors import ModelUnsupported
from loralane_server.model.rope import Rope, read_rope


@dataclass(frozen=True, slots=True)
class Family:
    """How an architecture differs from Llama."""

    #: Bias on q, k, v; None = as `attention_bias` says.
    qkv_bias: bool | None = None
    #: Bias on o; None = as `attention_bias` says.
    o_bias: bool | None = None
    #: RMS norm of each query and key head before the rotary embedding.
    qk_norm: bool = False
    #: Stored as `qkv_proj` and `gate_up_proj`: rows in the order of the linears in them.
    fused: bool = False
    #: Fields that are known in this family only.
    known: frozenset[str] = frozenset()


FAMILIES: Final[Mapping[str, Family]] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(qkv_bias=False, o_bias=False),
    "Qwen2ForCausalLM": Family(qkv_bias=True, o_bias=False),
    "Qwen3ForCausalLM": Family(qk_norm=True),
    # The original length belongs to longrope: `read_rope` reads it.
    "Phi3ForCausalLM": Family(
        qkv_bias=False,
        o_bias=False,
        fused=True,
        known=frozenset({"original_max_position_embeddings"}),
    ),
}

#: Read below, or by `read_rope`.
_READ: Final = frozenset(
    "architectures hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim vocab_size max_position_embeddings rms_norm_eps hidden_act "
    "tie_word_embeddings attention_bias mlp_bias sliding_window use_sliding_window "
    "max_window_layers layer_types rope_theta rope_scaling rope_parameters "
    "eos_token_id torch_dtype dtype quantization_config partial_rotary_factor".split()
)
#: Says nothing about the forward pass in inference.
_HARMLESS: Final = frozenset(
    "model_type transformers_version use_cache initializer_range pretraining_tp attention_dropout "
    "bos_token_id pad_token_id return_dict output_attentions output_hidden_states is_decoder "
    "is_encoder_decoder id2label label2id chunk_size_feed_forward problem_type tokenizer_class "
    "prefix task_specific_params finetuning_task auto_map unsloth_version unsloth_fixed name "
    "resid_pdrop embd_pdrop mlp_dropout hidden_dropout cross_attention_hidden_size "
    "add_cross_attention tie_encoder_decoder torchscript use_bfloat16 tf_legacy_loss pruned_heads "
    "base_model_tp_plan base_model_pp_plan".split()
)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape and the maths of one decoder."""

    architecture: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    #: Longest sequence that the model was made for, in tokens.
    max_positions: int
    norm_eps: float
    rope: Rope
    tied_head: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    #: The checkpoint holds q, k, v as one `qkv_proj`, gate and up as one `gate_up_proj`.
    fused: bool
    eos_token_ids: tuple[int, ...]
    #: The dtype in which the weights are stored, as config.json says ("float32", "bfloat16", ...).
    stored_dtype: str

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads."""
        return self.kv_heads * self.head_dim

    @property
    def balance(self) -> int:
        """Tokens of context at which attention multiplies as often as a layer's linears do."""
        return sum(out * inside for out, inside in self.linears().values()) // (2 * self.q_size)

    def linears(self) -> dict[str, tuple[int, int]]:
        """Return (out, in) of each linear of a layer that an adapter may change."""
        return {
            "q_proj": (self.q_size, self.hidden),
            "k_proj": (self.kv_size, self.hidden),
            "v_proj": (self.kv_size, self.hidden),
            "o_proj": (self.hidden, self.q_size),
            "gate_proj": (self.intermediate, self.hidden),
            "up_proj": (self.intermediate, self.hidden),
            "down_proj": (self.hidden, self.intermediate),
        }


def read_model_spec(folder: Path) -> ModelSpec:
    """Read config.json (and the EOS set of generation_config.json) of a Hugging Face folder.

    Raises `ModelUnsupported` naming the architecture or the field that is not implemented.
    """
    config = _read_json(folder / "config.json")
    spec = model_spec(config)
    generation = folder / "generation_config.json"
    if generation.is_file():
        eos = _ids(_read_json(generation).get("eos_token_id"))
        if eos:
            return replace(spec, eos_token_ids=eos)
    return spec


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    """Turn a parsed config.json into a `ModelSpec`; see `read_model_spec`."""
    architecture = (config.get("architectures") or ["(none)"])[0]
    family = FAMILIES.get(architecture)
    if family is None:
        raise ModelUnsupported(
            f"config.json: architecture {architecture} is not supported; "
            f"supported: {', '.join(FAMILIES)}"
        )
    _refuse_unknown(config, family.known)
    bias = bool(config.get("attention_bias", False))
    heads = _positive(config, "num_attention_heads")
    hidden = _positive(config, "hidden_size")
    longest, rope = _max_positions(config), read_rope(config)
    return ModelSpec(
        architecture=architecture,
        layers=_positive(config, "num_hidden_layers"),
        hidden=hidden,
        intermediate=_positive(config, "intermediate_size"),
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        vocab=_positive(config, "vocab_size"),
        max_positions=min(longest, rope.max_positions or longest),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=rope,
        tied_head=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=bias if family.o_bias is None else family.o_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        fused=family.fused,
        eos_token_ids=_ids(config.get("eos_token_id")),
        stored_dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    )


def _refuse_unknown(config: Mapping[str, Any], of_family: frozenset[str]) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise ModelUnsupported(f"config.json: hidden_act {config['hidden_act']!r}: only 'silu'")
    if config.get("quantization_config"):
        raise ModelUnsupported(
            "config.json: quantization_config: quantized weights; use the original"
        )
    if config.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise ModelUnsupported("config.json: partial_rotary_factor other than 1 is not implemented")
    known = _READ | _HARMLESS | of_family
    for name, value in config.items():
        neutral = value is None or value is False or value in ({}, [], "")
        if name not in known and name[0] != "_" and not neutral:
            raise ModelUnsupported(
                f"config.json: field {name} = {value!r} is not known to this server and could "
                "change the answers; remove it if it does not"
            )


def _max_positions(config: Mapping[str, Any]) -> int:
    """Return the longest sequence for which full attention is exact.

    A sliding window is not implemented; up to its size it changes nothing, so it is a limit here.
    """
    longest = _positive(config, "max_position_embeddings")
    window = config.get("sliding_window")
    sliding = config.get("use_sliding_window", True) if window else False
    layer_types = config.get("layer_types")
    if layer_types is not None:
        sliding = "sliding_attention" in layer_types
        unknown = set(layer_types) - {"sliding_attention", "full_attention"}
        if unknown:
            raise ModelUnsupported(f"config.json: layer_types {sorted(unknown)} not implemented")
    return min(longest, int(window)) if sliding and window else longest


def _positive(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value <= 0:
        raise ModelUnsupported(f"config.json: {name} must be a positive integer, found {value!r}")
    return value


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as exc:
        raise ModelUnsupported(f"{path} is missing; is this a Hugging Face model folder?") from exc
    except ValueError as exc:
        raise ModelUnsupported(f"{path} is not JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise ModelUnsupported(f"{path} must hold a JSON object")
    return value
