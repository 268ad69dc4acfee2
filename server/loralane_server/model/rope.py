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
class Rope:
    """Base frequency and how it is scaled for long contexts."""

    theta: float
    #: Positions are divided by this ("linear" scaling); 1 = off.
    linear_factor: float = 1.0
    llama3: Llama3Scaling | None = None

    def frequencies(self, head_dim: int) -> Tensor:
        """Return the angle per position of each pair of channels: [head_dim / 2], float32."""
        exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        inverse = 1.0 / (self.theta**exponent)
        if self.llama3 is not None:
            return _llama3(inverse, self.llama3)
        return inverse / self.linear_factor

    def tables(self, positions: int, head_dim: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each [positions, head_dim], float32."""
        angles = torch.outer(torch.arange(positions).float(), self.frequencies(head_dim))
        angles = torch.cat((angles, angles), dim=-1)
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
        case _:
            raise ModelUnsupported(
                f"config.json: rope scaling {rule!r} is not implemented; "
                "implemented: default, linear, llama3"
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


def _llama3(inverse: Tensor, rule: Llama3Scaling) -> Tensor:
    """Blend stretched and kept frequencies by wavelength (Llama 3.1's published rule)."""
    wavelength = 2 * math.pi / inverse
    turns = rule.original_max_positions / wavelength
    kept = (turns - rule.low_freq_factor) / (rule.high_freq_factor - rule.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return inverse * kept + inverse / rule.factor * (1 - kept)
