"""Rotary position embedding: frequencies by config, and the rotation itself.

cos, sin   [positions, head_dim]   tables, float32, one row a position
x          [tokens, heads, head_dim]
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loralane_server.errors import ModelUnsupported


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's rule: low frequencies are stretched, high ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class LongRope:
    """Phi-3's rule for sequences up to the length that the model was first made for.

    Longer ones have other factors, for all their positions: the keys of a sequence that grows past
    that length would all have to be computed again. So that length is a limit here.
    """

    #: Stretches each frequency: [head_dim / 2].
    short_factor: tuple[float, ...]
    #: What cos and sin are multiplied by.
    attention_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class Rope:
    """Base frequency and how it is scaled for long contexts."""

    theta: float
    #: Positions are divided by this ("linear" scaling); 1 = off.
    linear_factor: float = 1.0
    llama3: Llama3Scaling | None = None
    longrope: LongRope | None = None

    @property
    def max_positions(self) -> int | None:
        """The longest sequence for which this is exact; None = no limit."""
        return None if self.longrope is None else self.longrope.original_max_positions

    def frequencies(self, head_dim: int) -> Tensor:
        """Return the angle per position of each pair of channels: [head_dim / 2], float32."""
        exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        inverse = 1.0 / (self.theta**exponent)
        if self.llama3 is not None:
            return _llama3(inverse, self.llama3)
        if self.longrope is not None:
            return 1.0 / (torch.tensor(self.longrope.short_factor) * self.theta**exponent)
        return inverse / self.linear_factor

    def tables(self, positions: int, head_dim: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each [positions, head_dim], float32."""
        angles = torch.outer(torch.arange(positions).float(), self.frequencies(head_dim))
        angles = torch.cat((angles, angles), dim=-1)
        if self.longrope is not None:
            factor = self.longrope.attention_factor
            return angles.cos() * factor, angles.sin() * factor
        return angles.cos(), angles.sin()


def read_rope(config: Mapping[str, Any]) -> Rope:
    """Read the rotary embedding of a config.json, old spelling (`rope_scaling`) or new.

    Raises `ModelUnsupported` for a rule that is not implemented.
    """
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
    rule = scaling.get("rope_type") or scaling.get("type") or "default"
    if scaling.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise ModelUnsupported("config.json: partial_rotary_factor other than 1 is not implemented")
    match rule:
        case "default":
            return Rope(theta)
        case "linear":
            return Rope(theta, linear_factor=float(scaling["factor"]))
        case "llama3":
            return Rope(theta, llama3=_read_llama3(config, scaling))
        case "longrope" | "su":
            return Rope(theta, longrope=_read_longrope(config, scaling))
        case _:
            raise ModelUnsupported(
                f"config.json: rope scaling {rule!r} is not implemented; "
                "implemented: default, linear, llama3, longrope"
            )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head: x [tokens, heads, head_dim] by cos, sin [tokens, 1, head_dim]."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


def _read_llama3(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> Llama3Scaling:
    original = scaling.get("original_max_position_embeddings") or config["max_position_embeddings"]
    try:
        return Llama3Scaling(
            factor=float(scaling["factor"]),
            low_freq_factor=float(scaling["low_freq_factor"]),
            high_freq_factor=float(scaling["high_freq_factor"]),
            original_max_positions=int(original),
        )
    except KeyError as exc:
        raise ModelUnsupported(f"config.json: rope scaling llama3 lacks {exc}") from exc


def _read_longrope(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> LongRope:
    longest = config["max_position_embeddings"]
    original = int(
        config.get("original_max_position_embeddings")
        or scaling.get("original_max_position_embeddings")
        or longest
    )
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    short = scaling.get("short_factor")
    if not isinstance(short, list) or len(short) != head_dim // 2:
        raise ModelUnsupported(
            f"config.json: rope scaling longrope needs short_factor, {head_dim // 2} numbers"
        )
    attention = scaling.get("attention_factor")
    if attention is None:
        stretch = scaling.get("factor") or longest / original
        attention = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    return LongRope(tuple(map(float, short)), float(attention), original)


def _llama3(inverse: Tensor, rule: Llama3Scaling) -> Tensor:
    """Blend stretched and kept frequencies by wavelength (Llama 3.1's published rule)."""
    wavelength = 2 * math.pi / inverse
    turns = rule.original_max_positions / wavelength
    kept = (turns - rule.low_freq_factor) / (rule.high_freq_factor - rule.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return inverse * kept + inverse / rule.factor * (1 - kept)
