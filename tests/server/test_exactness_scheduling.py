"""However rows are scheduled, tokens in float32 are those of transformers + PEFT.

Prefix cache on or off, chunks of any size, pages for all rows or for hardly two. Prompts share
beginnings within an adapter and across adapters, end at the edge of a page or beside it, come again
while they run and afterwards, and with what was generated as part of the prompt.
"""

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from loralane_server.config import ShardConfig
from loralane_server.device.seam import Sampling
from loralane_server.kv.pages import PAGE_TOKENS
from loralane_server.rows import Admission
from loralane_server.sampling import choose
from peft import PeftModel

from tests import reference
from tests.conftest import DeviceName
from tests.server.conftest import Listener, digest_of, make_family, running

TOKENS = 56
ROWS = 8
#: Prompt and answer of the longest row.
LENGTH = 144
#: More than all adapters own; on XLA one window, which keeps the graphs few.
LANES = 128
#: Bytes of a page of the tiny Llama: keys and values of 3 layers, 2 heads of 16, in float32.
PAGE_BYTES = 2 * 3 * 2 * 16 * 4 * PAGE_TOKENS
PLENTY = ROWS * LENGTH // PAGE_TOKENS
#: The longest row alone takes 9.
FEW = 11
ADAPTERS = (
    reference.AdapterRecipe("all", 8, 16),
    reference.AdapterRecipe("kv", 4, 8, ("k_proj", "v_proj")),
    reference.AdapterRecipe("mlp", 16, 32, ("gate_proj", "down_proj")),
)
NAMES = ("", *(recipe.name for recipe in ADAPTERS))
DRAWN = Sampling(temperature=0.8, top_k=40, top_p=0.95, seed=11)


@dataclass(frozen=True)
class Case:
    """A request and the tokens that must follow."""

    adapter: str
    prompt: tuple[int, ...]
    sampling: Sampling
    expected: tuple[int, ...]


@dataclass(frozen=True)
class Family:
    folder: Path
    model: Any
    cases: tuple[Case, ...]
    device: DeviceName

    def config(
        self, *, pages: int, step_tokens: int = 48, prefix_cache: Literal["on", "off"] = "on"
    ) -> ShardConfig:
        return ShardConfig(
            model=str(self.folder / "model"),
            adapter_roots=(self.folder / "adapters",),
            device=self.device,
            dtype="float32",
            max_rows=ROWS,
            max_model_len=LENGTH,
            kv_memory=pages * PAGE_BYTES,
            lanes=LANES,
            step_tokens=step_tokens,
            prefix_cache=prefix_cache,
            threads=1,
        )


def prompts_of(rng: random.Random) -> list[tuple[int, ...]]:
    """Most begin alike: by less than a page, by whole pages, by all but the end."""
    shared = tuple(rng.randrange(256) for _ in range(80))
    tails = [tuple(rng.randrange(256) for _ in range(n)) for n in (1, 5, 40)]
    return [
        shared[:48],
        shared[:64] + tails[0],
        shared[:40] + tails[2],
        shared + tails[1],
        shared[:7],
    ]


def expected(
    model: Any, adapter: Path | None, prompt: Sequence[int], sampling: Sampling
) -> list[int]:
    """Ask transformers (and PEFT) for the logits of the whole text, and choose, token by token."""
    adapted = model if adapter is None else PeftModel.from_pretrained(model, adapter)
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(TOKENS):
            logits = adapted(torch.tensor([tokens])).logits[:, -1]
            tokens.append(int(choose(logits, [sampling], [len(tokens)])[0]))
    if isinstance(adapted, PeftModel):
        adapted.unload()
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory, device: DeviceName) -> Family:
    folder = make_family("llama", tmp_path_factory.mktemp("family"), ADAPTERS)
    model = reference.random_model(reference.FAMILIES["llama"])
    rng = random.Random(3)
    cases = []
    for name in NAMES:
        path = folder / "adapters" / name if name else None
        for i, prompt in enumerate(prompts_of(random.Random(5))):
            sampling = DRAWN if i == 1 else Sampling()
            found = expected(model, path, prompt, sampling)
            cases.append(Case(name, prompt, sampling, tuple(found)))
    # Adapters that change nothing, or answers of one token, would prove nothing.
    assert len({case.expected for case in cases}) == len(cases)
    assert sum(len(set(case.expected)) for case in cases) > 8 * len(cases)
    rng.shuffle(cases)
    return Family(folder, model, tuple(cases), device)


def admission(request_id: int, digest: str, case: Case, generated: int = 0) -> Admission:
    """Ask for a case, as if some of its tokens had been generated elsewhere."""
    prompt = case.prompt + case.expected[:generated]
    return Admission(request_id, digest, prompt, TOKENS - generated, sampling=case.sampling)


def digests_of(listener: Listener) -> dict[str, str]:
    return {name: digest_of(listener.shard, name) if name else "" for name in NAMES}


def run(listener: Listener, admissions: Sequence[Admission]) -> None:
    """Keep as many rows on the shard as it takes."""
    let_in: list[int] = []

    def has_room() -> bool:
        return sum(not listener.ended(i) for i in let_in) < ROWS

    for asked in admissions:
        listener.wait_until(has_room)
        let_in.append(asked.request_id)
        listener.admit(asked)
    listener.wait(*let_in)


def cached(listener: Listener, request_id: int) -> int:
    first, *others = listener.rows[request_id]
    assert not any(event.cached_tokens for event in others)
    return first.cached_tokens


@pytest.mark.parametrize("pages", [PLENTY, FEW])
@pytest.mark.parametrize("prefix_cache", ["on", "off"])
@pytest.mark.parametrize("step_tokens", [16, 48, 512])
def test_tokens_equal_the_reference_however_rows_are_scheduled(
    family: Family, step_tokens: int, prefix_cache: Literal["on", "off"], pages: int
) -> None:
    """All at first as they are, then again with more and more of the answer in the prompt."""
    config = family.config(pages=pages, step_tokens=step_tokens, prefix_cache=prefix_cache)
    splits = [0, 0, 1, 8, 24, 33, 55]
    asked = [(case, splits[i % 7] if i >= 20 else 0) for i, case in enumerate(family.cases * 2)]
    with running(config) as listener:
        digests = digests_of(listener)
        run(
            listener,
            [admission(i, digests[c.adapter], c, split) for i, (c, split) in enumerate(asked)],
        )
        produced = [listener.tokens(i) for i in range(len(asked))]
        found = sum(cached(listener, i) > 0 for i in range(len(asked)))
        preemptions = listener.shard.engine.preemptions

    wrong = {
        (case.adapter or "base", len(case.prompt), split)
        for (case, split), tokens in zip(asked, produced, strict=True)
        if tuple(tokens) != case.expected[split:]
    }
    assert wrong == set()
    assert (preemptions > 0) == (pages == FEW)
    assert (found > 0) == (prefix_cache == "on")


def test_a_replayed_row_computes_no_page_twice(family: Family) -> None:
    case = next(case for case in family.cases if case.adapter == "all" and case.sampling is DRAWN)
    with running(family.config(pages=PLENTY)) as listener:
        digest = digests_of(listener)["all"]
        listener.generate(admission(0, digest, case))

        listener.generate(*(admission(1 + n, digest, case, generated=n) for n in (0, 30, 47)))

        for n in (0, 30, 47):
            assert listener.tokens(1 + n) == list(case.expected[n:])
            last = len(case.prompt) + n - 1  # of this token nothing is ever taken from the cache
            assert cached(listener, 1 + n) == last // PAGE_TOKENS * PAGE_TOKENS


def test_rows_let_in_together_compute_what_they_share_once(family: Family) -> None:
    base = [case for case in family.cases if not case.adapter]
    case = max(base, key=lambda case: len(case.prompt))
    config = family.config(pages=PLENTY, step_tokens=len(case.prompt))
    with running(config) as listener:
        listener.generate(*(admission(i, "", case) for i in range(4)))

        assert [listener.tokens(i) for i in range(4)] == [list(case.expected)] * 4
        assert [cached(listener, i) for i in range(4)] == [0, 80, 80, 80]


def test_adapters_and_base_never_share_keys_and_values(family: Family) -> None:
    prompt = prompts_of(random.Random(5))[3]
    cases = {case.adapter: case for case in family.cases if case.prompt == prompt}
    with running(family.config(pages=PLENTY)) as listener:
        digests = digests_of(listener)

        for i, name in enumerate([*NAMES, *NAMES]):
            listener.generate(admission(i, digests[name], cases[name]))

        for i, name in enumerate([*NAMES, *NAMES]):
            assert listener.tokens(i) == list(cases[name].expected)
            assert cached(listener, i) == (0 if i < len(NAMES) else 80)


def test_an_adapter_whose_files_are_replaced_never_sees_what_the_old_one_computed(
    family: Family,
) -> None:
    adapters = family.folder / "adapters"
    shutil.copytree(adapters / "all", adapters / "changing")
    prompt = prompts_of(random.Random(5))[0]
    old, new = (
        next(c for c in family.cases if c.adapter == name and c.prompt == prompt)
        for name in ("all", "mlp")
    )
    with running(family.config(pages=PLENTY)) as listener:
        before = digest_of(listener.shard, "changing")
        listener.generate(admission(0, before, old))
        shutil.rmtree(adapters / "changing")
        shutil.copytree(adapters / "mlp", adapters / "changing")
        after = digest_of(listener.shard, "changing")

        listener.generate(admission(1, after, new), admission(2, before, old))

        assert after != before
        assert listener.tokens(1) == list(new.expected)
        assert (cached(listener, 1), cached(listener, 2)) == (0, 32)
        assert listener.tokens(0) == listener.tokens(2) == list(old.expected)
    shutil.rmtree(adapters / "changing")
