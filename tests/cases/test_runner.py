"""The runner itself: its oracle is right, it can fail, and it passes nothing unknown."""

import json
import pickle
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest

from tests.cases import base as tiny
from tests.cases import runner as registers_the_checks
from tests.cases.case import Case, read_cases
from tests.cases.complete import complete
from tests.cases.expect import Scope, failures
from tests.cases.materialise import Adapter, default_adapter, read_adapter
from tests.cases.oracle import Oracle, scripted_head
from tests.cases.placeholders import fill
from tests.cases.replies import Reply
from tests.cases.runner import Runner, may_skip
from tests.cases.server import CannotServe
from tests.cases.shapes import mismatch, missing
from tests.cases.tensors import NotUnderstood
from tests.cases.wire import encode

PROMPT = encode("hello world")
COUNT = 24
DEV_CASES = Path(__file__).with_name("cases.dev.jsonl")


def reply(status: int = 200, body: object = None, **more: Any) -> Reply:
    headers = {"content-type": "application/json"}
    given: dict[str, Any] = {
        "id": "r",
        "status": status,
        "body": json.dumps(body).encode(),
        "headers": headers,
    }
    return Reply("http", "/generate", **(given | more))


def scope(*replies: Reply) -> Scope:
    assert registers_the_checks.CHECKS
    return Scope(None, replies)  # type: ignore[arg-type]  # nothing here asks for the server


def case(**parts: Any) -> Case:
    plain = {
        "id": "x", "kind": "x", "note": "", "setup": {}, "expected": {}, "request": ()
    }  # fmt: skip
    return Case(**(plain | parts))


def peft_tokens(folder: Path, adapter: Adapter | None) -> list[int]:
    """What transformers and PEFT make of the files that the runner writes."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    if adapter is not None:
        adapter.write(folder / "adapter")
        with warnings.catch_warnings(action="ignore"):  # a bias for a linear without; no v_proj
            model = PeftModel.from_pretrained(model, folder / "adapter")
    ids = torch.tensor([PROMPT])
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=COUNT,
        min_new_tokens=COUNT,
    )
    return list(out[0, len(PROMPT) :].tolist())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("seed", [None, 3])
def test_the_oracle_agrees_with_transformers_and_peft(
    tmp_path: Path, tied: bool, seed: int | None
) -> None:
    base = tiny.Base(tied=tied)
    weights = tiny.random_weights(base)
    tiny.write_base(base, weights, tmp_path / "model")
    oracle = Oracle(weights, tied=tied, stops=())
    adapter = None if seed is None else default_adapter(seed)

    if adapter is None:
        found = oracle.base(PROMPT, COUNT)
    else:
        found = oracle.merged(adapter, None, PROMPT, COUNT)

    assert list(found.ids) == peft_tokens(tmp_path, adapter)


@pytest.mark.parametrize(
    "case_id",
    [
        "math-dora",
        "math-lora-bias",
        "math-embedding-lora",
        "math-tied-lm-head",
        "load-token-adapter",
    ],
)
def test_the_whole_of_an_adapter_is_what_peft_makes_of_it(tmp_path: Path, case_id: str) -> None:
    (found,) = (c for c in read_cases(DEV_CASES) if c.id == case_id)
    adapter, tied = found.named("a"), found.setup["base"] == "tiny-llama-tied"
    base = tiny.Base(tied=tied)
    weights = tiny.random_weights(base)
    tiny.write_base(base, weights, tmp_path / "model")
    oracle = Oracle(weights, tied=tied, stops=())

    whole = oracle.completed(adapter, complete, PROMPT, COUNT)

    assert list(whole.ids) == peft_tokens(tmp_path, adapter)
    assert whole.ids != oracle.base(PROMPT, COUNT).ids


def test_a_wrong_scale_is_another_answer() -> None:
    oracle = Oracle(tiny.random_weights(tiny.Base()), tied=False, stops=())
    adapter = default_adapter(1)

    by_scale = {s: oracle.merged(adapter, s, PROMPT, COUNT).ids for s in (0.0, 1.0, 2.0)}

    assert by_scale[0.0] == oracle.base(PROMPT, COUNT).ids
    assert by_scale[2.0] == oracle.merged(adapter, None, PROMPT, COUNT).ids
    assert len(set(by_scale.values())) == 3


def test_the_oracle_takes_no_adapter_for_one_that_is_gone() -> None:
    oracle = Oracle(tiny.random_weights(tiny.Base()), tied=False, stops=())
    adapter = default_adapter(1)
    known = weakref.ref(adapter)
    oracle.merged(adapter, None, PROMPT, 1)

    del adapter

    assert known() is not None, "another adapter could come to its place, and get its answers"


def test_a_scripted_base_says_its_script() -> None:
    weights = tiny.random_weights(tiny.Base())
    script = (*b"aaab STOP tail", tiny.EOS)
    prompts = [encode("x"), encode("another prompt")]

    weights["lm_head.weight"] = scripted_head(weights, prompts, script)
    oracle = Oracle(weights, tied=False, stops=[tiny.EOS])

    assert [oracle.base(prompt, 20).ids for prompt in prompts] == [script, script]


@pytest.mark.parametrize(
    "expected",
    [
        {"status": 200},
        {"status_in": [200, 400]},
        {"error_mentions_any": ["rank"]},
        {"every_step": {"json": {"error": "int"}}},
        {"r": {"needs": ["details.tokens"]}},
        {"steps": [{"any_of": [{"status": 200}, {"header": "retry-after"}]}]},
        {"never_status": 404},
        [200],
        409,
        "202/200 after drain",
    ],
)
def test_what_is_not_as_expected_is_told(expected: object) -> None:
    assert failures(expected, scope(reply(404, {"error": "no such adapter"})))


@pytest.mark.parametrize(
    "expected",
    [
        {"status": 404},
        {"status_in": [404], "error_mentions_any": ["nope", "ADAPTER"]},
        {"every_step": {"json": {"error": "string"}}, "note": "for people"},
        {"steps": [{"any_of": [{"status": 200}, 404]}]},
        None,
    ],
)
def test_what_is_as_expected_passes(expected: object) -> None:
    assert failures(expected, scope(reply(404, {"error": "no such adapter"}))) == []


@pytest.mark.parametrize(
    "expected",
    [
        {"brand_new_check": 1},
        {"status": 200, "never": "something that nobody wrote down"},
        {"output": "the reference of a format unknown here"},
        "a sentence of no known form",
        {"steps": [{"brand_new_check": 1}]},
        ["not a number"],
        True,
    ],
)
def test_an_expectation_that_is_not_understood_never_passes(expected: object) -> None:
    with pytest.raises(NotUnderstood):
        failures(expected, scope(reply(200, {"generated_text": "x"})))


@pytest.mark.parametrize(
    "parts",
    [
        {"setup": {"moon_phase": 1}},
        {"setup": {"base": "huge-llama"}},
        {"setup": {"server": {"moon_phase": 1}}},
        {"setup": {"cache_fs": "ext4"}},
    ],
)
def test_a_setup_that_is_not_understood_is_a_failure_and_starts_nothing(
    parts: dict[str, Any],
) -> None:
    verdict = Runner().run(case(**parts))

    assert verdict.outcome == "fail"
    assert "does not understand" in verdict.reasons[0]


@pytest.mark.parametrize(
    ("why", "may"),
    [
        ("loralane: --device xla needs torch_xla", True),
        ("loralane serve: error: argument --device: invalid choice: 'cuda'", True),
        ("AssertionError", False),
        ("not ready within 120 s", False),
        ("mount: permission denied", False),
    ],
)
def test_a_case_is_skipped_only_where_the_server_refuses_its_settings(why: str, may: bool) -> None:
    optional = case(setup={"server": {"skip_if_unsupported": True}})

    assert may_skip(optional, CannotServe(why)) == may
    assert not may_skip(case(), CannotServe(why))


def test_a_case_field_that_is_not_understood_stops_the_file(tmp_path: Path) -> None:
    path = tmp_path / "new.jsonl"
    path.write_text(json.dumps({"id": "x", "moon_phase": 1}))

    with pytest.raises(NotUnderstood, match="moon_phase"):
        read_cases(path)


def test_an_adapter_field_that_is_not_understood_is_refused() -> None:
    with pytest.raises(NotUnderstood, match="moon_phase"):
        read_adapter({"config": {}, "moon_phase": 1})


def test_a_pickle_does_its_harm_where_it_is_told(tmp_path: Path) -> None:
    entry = {"files": {"adapter_model.bin": {"pickle_marker": "touch $TMP/pwned"}}}

    read_adapter(entry).below(str(tmp_path)).write(tmp_path / "a")
    pickle.loads((tmp_path / "a" / "adapter_model.bin").read_bytes())

    assert (tmp_path / "pwned").exists(), "the marker proves that nobody unpickles"


def test_placeholders_become_what_they_stand_for() -> None:
    meanings = {"BASE": lambda _: "tiny", "ADAPTER": lambda name: f"/root/{name}"}
    given = {"model": "$BASE/x", "id": "$ADAPTER(a)", "p": "$TOKENS(3)", "l": "$LIST(s,2)"}

    assert fill(given, meanings) == {
        "model": "tiny/x", "id": "/root/a", "p": "aa", "l": ["s", "s"]
    }  # fmt: skip
    assert fill('$REPEAT({"a":,3)', meanings) == '{"a":{"a":{"a":'
    with pytest.raises(NotUnderstood):
        fill("$MOON", meanings)


@pytest.mark.parametrize(
    ("value", "path", "lacks"),
    [
        ({"a": [{"x": 1, "y": 2}]}, "a[*].{x,y}", 0),
        ({"a": [{"x": 1}, {}]}, "a[*].{x,y}", 3),
        ({"a": []}, "a[*].x", 1),
        ({}, "a.b", 1),
    ],
)
def test_a_path_tells_what_a_value_lacks(value: object, path: str, lacks: int) -> None:
    assert len(missing(value, path)) == lacks


@pytest.mark.parametrize(
    ("value", "shape", "fits"),
    [
        ("x", "string", True),
        (1, "int", True),
        (True, "int", False),
        (None, "str|null", True),
        ("length", "length|eos_token", True),
        ("other", "length|eos_token", False),
        ([{}], "array of 1", True),
        ([], "array of 1", False),
        ({"a": {"b": "x"}}, {"a": {"b": "str"}}, True),
        ({"a": 1}, {"a": {"b": "str"}}, False),
        (8, 8, True),
    ],
)
def test_a_shape_fits_or_tells_why_not(value: object, shape: object, fits: bool) -> None:
    assert (mismatch(value, shape) is None) is fits
