"""A step's logits are those of transformers with each row's adapter merged into the weights."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loralane_server.device.cpu import CpuDevice
from loralane_server.device.seam import Sampling, Span, StepInput, TableRows, TargetTensors
from loralane_server.model.decoder import Decoder
from loralane_server.model.spec import ModelSpec, read_model_spec
from loralane_server.model.weights import load_decoder
from torch import Tensor, nn

from tests import reference
from tests.server.handmade import TABLES, Adapter, shapes_of, table, target

PAGE_TOKENS, PAGES_A_ROW = 8, 2
#: A prompt of each row, and the token that follows it.
ROWS = 7


class Served:
    """A decoder on a CPU device, run by hand."""

    def __init__(self, folder: Path) -> None:
        self.spec: ModelSpec = read_model_spec(folder)
        self.device = CpuDevice(
            self.spec,
            dtype=torch.float32,
            pages=ROWS * PAGES_A_ROW,
            page_tokens=PAGE_TOKENS,
            lanes=64,
        )
        self._decoder: Decoder[Any] = load_decoder(
            folder, self.spec, self.device, torch.float32, PAGE_TOKENS * PAGES_A_ROW
        )

    def step(self, rows: list[tuple[list[int], Adapter | None]], start: int) -> Tensor:
        """Compute tokens of each row from position `start`; return the last ones' logits."""
        spans = [
            Span(start, len(tokens), self._kv_pages(i), () if who is None else who.pages)
            for i, (tokens, who) in enumerate(rows)
        ]
        lengths = [span.length for span in spans]
        step = StepInput(
            tokens=np.concatenate([tokens for tokens, _ in rows]).astype(np.int32),
            positions=np.concatenate([start + np.arange(n) for n in lengths]).astype(np.int32),
            spans=spans,
            sample_at=(np.cumsum(lengths) - 1).astype(np.int32),
            sampling=[Sampling()] * len(rows),
        )
        with torch.inference_mode():
            return self._decoder.logits(self.device.batch(step))

    def _kv_pages(self, row: int) -> "np.ndarray[Any, np.dtype[np.int32]]":
        return np.arange(row * PAGES_A_ROW, (row + 1) * PAGES_A_ROW, dtype=np.int32)


def merged(model: Any, adapter: Adapter) -> Any:
    """The model with an adapter in its weights: head untied, every linear with a bias."""
    model = copy.deepcopy(model)
    model.lm_head = merged_linear(model.lm_head, adapter.targets.get("lm_head"))
    embedding = model.model.embed_tokens
    embedding.weight = nn.Parameter(merged_embedding(embedding.weight, adapter.targets))
    for name, rows in adapter.tables.items():
        place = model.lm_head if name == "lm_head" else embedding
        replace(place, rows)
    for layer in model.model.layers:
        for name, change in adapter.linears.items():
            block = layer.self_attn if hasattr(layer.self_attn, name) else layer.mlp
            setattr(block, name, merged_linear(getattr(block, name), change))
    return model


def merged_linear(linear: nn.Linear, change: TargetTensors | None) -> nn.Linear:
    out, inside = linear.weight.shape
    whole = nn.Linear(inside, out)
    bias = torch.zeros(out) if linear.bias is None else linear.bias
    gain = torch.zeros(out) if change is None or change.gain is None else change.gain
    shift = torch.zeros(out) if change is None or change.shift is None else change.shift
    delta = torch.zeros(out, inside) if change is None else change.b.T @ change.a
    with torch.no_grad():
        whole.weight.copy_((1 + gain)[:, None] * linear.weight + delta)
        whole.bias.copy_((1 + gain) * bias + shift)
    return whole


def merged_embedding(weight: Tensor, targets: dict[str, TargetTensors]) -> Tensor:
    change = targets.get("embed_tokens")
    return weight.detach() if change is None else weight.detach() + change.a.T @ change.b


def replace(place: nn.Module, rows: TableRows) -> None:
    weight: Any = place.weight
    with torch.no_grad():
        weight[slice(None) if rows.ids is None else rows.ids] = rows.rows
        if isinstance(place, nn.Linear):
            place.bias[slice(None) if rows.ids is None else rows.ids] = 0


def zoo(spec: ModelSpec) -> list[Adapter]:
    """Adapters of every kind, each on pages of its own."""
    shapes = shapes_of(spec)

    def targets(*names: str, seed: int, gain: float = 0, shift: float = 0) -> Any:
        return {m: target(shapes[m], 12, seed, gain=gain, shift=shift) for m in names}

    linears = tuple(spec.linears())
    some_ids = [5, 250, 17, 0, 99]
    return [
        Adapter((0, 1), targets(*linears, seed=1)),
        Adapter((2, 4), targets(*linears, seed=2, gain=0.3, shift=0.5)),
        Adapter((3, 5), targets("embed_tokens", "lm_head", "q_proj", seed=3, shift=0.0)),
        Adapter(
            (6, 7),
            targets("v_proj", "lm_head", seed=4, gain=0.2, shift=0.3),
            {"embed_tokens": table(spec, None, 4, scale=0.3)},
        ),
        Adapter((), {}, {m: table(spec, some_ids, 5, scale=0.3) for m in TABLES}),
        Adapter((), targets("k_proj", seed=6), {"lm_head": table(spec, None, 6, scale=0.3)}),
    ]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_each_rows_logits_are_those_of_its_merged_model(family: str, tmp_path: Path) -> None:
    model: Any = reference.random_model(reference.FAMILIES[family])
    reference.save_model(model, tmp_path)
    served = Served(tmp_path)
    adapters = zoo(served.spec)
    # The last two take the pages of the first two, which have left.
    adapters[4].pages, adapters[5].pages = adapters[0].pages, adapters[1].pages
    make = torch.Generator().manual_seed(3)
    prompts = torch.randint(0, 256, (4, 6), generator=make).tolist()
    prompts[0][2:4] = 5, 99  # tokens whose rows are replaced

    for present in (adapters[:4], adapters[2:]):
        for adapter in present:
            adapter.write(served.device, served.spec.layers)
        owners = [*present, present[1], None, None]
        rows = [(prompts[i % len(prompts)], who) for i, who in enumerate(owners)]
        first = served.step(rows, 0)
        then = served.step([([tokens[0]], who) for tokens, who in rows], len(prompts[0]))
        for row, (tokens, who) in enumerate(rows):
            ids = torch.tensor([[*tokens, tokens[0]]])
            with torch.no_grad():
                want = (model if who is None else merged(model, who))(ids).logits[0]
                assert who is None or (want - model(ids).logits[0])[-2:].abs().amax() > 0.1
            torch.testing.assert_close(first[row], want[-2], atol=2e-4, rtol=2e-4)
            torch.testing.assert_close(then[row], want[-1], atol=2e-4, rtol=2e-4)
