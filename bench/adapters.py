"""Adapters of rank 16 for the random model, as many as a benchmark loads; made once."""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tqdm import tqdm

from bench.model import CONFIG, WEIGHTS, save_adapter, save_config

RANK: Final = 16
_SEED: Final = 5000
_CHUNK: Final = 1 << 20


def rank16(model: Path, dtype: str, count: int) -> dict[str, Path]:
    """Return `count` adapters of a model folder by name, made where they are missing.

    Their configs name the base by its path, which is what vLLM's resolver compares.
    """
    found = {f"s{n:03}": model / "rank16" / f"s{n:03}" for n in range(count)}
    missing = [n for n, folder in enumerate(found.values()) if not (folder / CONFIG).exists()]
    for n in tqdm(missing, "making adapters", disable=not missing):
        save_adapter(found[f"s{n:03}"], RANK, _SEED + n)
    for folder in found.values():
        save_config(folder, RANK, str(model / dtype))
    return found


def warm_page_cache(folders: Iterable[Path]) -> None:
    """Read all files once, so that no disk is in what is measured."""
    for folder in folders:
        for path in (folder / CONFIG, folder / WEIGHTS):
            with path.open("rb") as file:
                while file.read(_CHUNK):
                    pass
