"""Tensors of a case file: their values, and their bytes in a safetensors file.

Numpy only, and written from the format's description, so that nothing of the server is shared.
"""

import json
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
#: tensor name -> (values as they are stored, dtype)
Tensors = dict[str, "Stored"]

#: (out, in) of each linear of the tiny base.
SHAPES: Final = {
    "q_proj": (64, 64),
    "k_proj": (32, 64),
    "v_proj": (32, 64),
    "o_proj": (64, 64),
    "gate_proj": (128, 64),
    "up_proj": (128, 64),
    "down_proj": (64, 128),
}
MLP: Final = frozenset({"gate_proj", "up_proj", "down_proj"})
_FLOATS: Final = {"F32": "<f4", "F16": "<f2", "F64": "<f8"}
_INTS: Final = {"I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8", "U8": "u1"}


class NotUnderstood(Exception):
    """The case file says something that this runner does not know; never a pass."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as it lies in a file: what a reader that upcasts exactly must see."""

    values: Array
    dtype: str
    raw: bytes


def stored(values: Array, dtype: str) -> Stored:
    """Round values to a dtype of safetensors. Raises NotUnderstood for an unknown one."""
    if dtype in _FLOATS:
        cast = values.astype(_FLOATS[dtype])
        return Stored(cast.astype(np.float64), dtype, cast.tobytes())
    if dtype in _INTS:
        whole = np.clip(values * 10, -127, 127).astype(_INTS[dtype])
        return Stored(whole.astype(np.float64), dtype, whole.tobytes())
    if dtype == "BF16":
        halves = _bfloat16(values)
        wide = (halves.astype("<u4") << 16).view("<f4").reshape(values.shape)
        return Stored(wide.astype(np.float64), dtype, halves.astype("<u2").tobytes())
    if dtype in ("F8_E4M3", "F8_E5M2"):
        table = _float8_table(exponent_bits=int(dtype[4]), finite_only=dtype == "F8_E4M3")
        finite = np.where(np.isfinite(table))[0]
        codes = finite[np.abs(values.reshape(-1, 1) - table[finite]).argmin(1)].astype("u1")
        return Stored(table[codes].reshape(values.shape), dtype, codes.tobytes())
    raise NotUnderstood(f"tensor dtype {dtype!r}")


def _bfloat16(values: Array) -> NDArray[np.uint16]:
    bits = values.astype("<f4").reshape(-1).view("<u4").astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype(
        np.uint16
    )
    rounded[np.isnan(values.reshape(-1))] = 0x7FC0
    return rounded


def _float8_table(*, exponent_bits: int, finite_only: bool) -> Array:
    """The 256 values of an 8-bit float; E4M3 has no infinity and one NaN for each sign."""
    mantissa_bits = 7 - exponent_bits
    top, bias = (1 << exponent_bits) - 1, (1 << (exponent_bits - 1)) - 1
    values = []
    for code in range(256):
        sign = -1.0 if code >> 7 else 1.0
        exponent, mantissa = (code >> mantissa_bits) & top, code & ((1 << mantissa_bits) - 1)
        fraction = mantissa / (1 << mantissa_bits)
        is_special = exponent == top and (not finite_only or mantissa == (1 << mantissa_bits) - 1)
        if is_special:
            values.append(np.nan if finite_only or mantissa else sign * np.inf)
        elif exponent == 0:
            values.append(sign * fraction * 2.0 ** (1 - bias))
        else:
            values.append(sign * (1 + fraction) * 2.0 ** (exponent - bias))
    return np.array(values)


def expand(entries: Iterable[Mapping[str, Any]]) -> Tensors:
    """Turn the `tensors` list of an adapter into tensors. Raises NotUnderstood."""
    found: dict[str, tuple[Array, str]] = {}
    for entry in entries:
        if "lora" in entry:
            _check_keys(entry, {"lora"})
            found |= _macro(entry["lora"])
        else:
            _check_keys(entry, {"name", "shape", "dtype", "fill"})
            values = _fill(entry["name"], entry["shape"], entry.get("fill", "normal"))
            found[entry["name"]] = values, entry.get("dtype", "F32")
    return {name: stored(values, dtype) for name, (values, dtype) in found.items()}


def _check_keys(entry: Mapping[str, Any], known: set[str]) -> None:
    if unknown := entry.keys() - known:
        raise NotUnderstood(f"tensor entry with {sorted(unknown)}")


def _macro(lora: Mapping[str, Any]) -> dict[str, tuple[Array, str]]:
    known = {"modules", "layers", "r", "seed", "dtype", "key_template", "std", "drop", "poke"}
    _check_keys(lora, known)
    rank, found = lora["r"], {}
    for layer in lora["layers"]:
        for module in lora["modules"]:
            rows, columns = SHAPES[module]
            for letter, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                name = lora["key_template"].format(
                    layer=layer,
                    block="mlp" if module in MLP else "self_attn",
                    module=module,
                    ab=letter,
                    ab_lower=letter.lower(),
                )
                values = _normal(name, shape, lora["seed"], lora.get("std", 0.1))
                found[name] = values, lora["dtype"]
    for name in lora.get("drop", ()):
        del found[name]
    for name, index, value in lora.get("poke", ()):
        found[name][0].reshape(-1)[index] = float(value)
    return found


def _fill(name: str, shape: list[int], fill: str) -> Array:
    kind, _, number = fill.partition("*")
    if kind == "normal":
        return _normal(name, shape, 0, float(number or 0.1))
    if kind == "ones":
        return np.full(shape, float(number or 1))
    if kind.startswith("uniform"):
        return _generator(name, 0).uniform(0.5, 1.5, shape)
    raise NotUnderstood(f"fill {fill!r}")


def _normal(name: str, shape: Any, seed: int, std: float) -> Array:
    return np.asarray(_generator(name, seed).standard_normal(shape) * std)


def _generator(name: str, seed: int) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def safetensors(tensors: Tensors) -> bytes:
    """Return the bytes of a safetensors file."""
    header: dict[str, object] = {}
    body = b""
    for name, tensor in tensors.items():
        offsets = [len(body), len(body) + len(tensor.raw)]
        shape = list(tensor.values.shape)
        header[name] = {"dtype": tensor.dtype, "shape": shape, "data_offsets": offsets}
        body += tensor.raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body
