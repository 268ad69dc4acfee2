"""Weights from a file: checked, and no API key ever shown."""

import json

import pytest
from loralane_router.queueing.weights import Weights, WeightsError


def test_adapters_have_weights_by_name_and_keys_by_a_flow_that_hides_them(tmp_path):
    file = tmp_path / "weights.json"
    file.write_text(json.dumps({"adapters": {"gold": 4}, "keys": {"sk-secret": 0.5}}))

    weights = Weights.load(str(file))
    flow = weights.key_flow("sk-secret")

    assert weights.adapters == {"gold": 4.0}
    assert weights.keys[flow] == 0.5
    assert "secret" not in f"{weights!r} {flow} {weights.keys}"


def test_only_a_key_that_has_a_weight_is_a_flow_of_its_own():
    weights = Weights.parse({"keys": {"known": 2}})

    assert weights.key_flow("known") is not None
    assert [weights.key_flow(key) for key in ("other", "", None)] == [None] * 3


def test_two_processes_know_a_key_by_different_flows():
    first, second = (Weights.parse({"keys": {"known": 2}}) for _ in range(2))

    assert first.key_flow("known") != second.key_flow("known")


@pytest.mark.parametrize(
    ("document", "named"),
    [
        ([], "must be an object"),
        ({"adaptors": {}}, '"adapters" and "keys"'),
        ({"sk-secret": 2}, '"adapters" and "keys"'),
        ({"adapters": ["a"]}, "'adapters' must be an object"),
        ({"adapters": {"a": 1, "b": 0}}, "adapter 'b'"),
        ({"adapters": {"a": -1}}, "adapter 'a'"),
        ({"adapters": {"a": True}}, "adapter 'a'"),
        ({"adapters": {"a": "2"}}, "adapter 'a'"),
        ({"adapters": {"a": float("nan")}}, "adapter 'a'"),
        ({"adapters": {"a": 10**400}}, "adapter 'a'"),
        ({"keys": {"sk-secret": 1, "sk-other": None}}, "key number 2"),
        ({"keys": {"gold": "sk-secret"}}, "key number 1"),
        ({"keys": {"": 1}}, "key number 1 is empty"),
    ],
)
def test_an_entry_that_is_no_weight_is_refused_by_name_and_a_key_by_its_place(document, named):
    with pytest.raises(WeightsError) as caught:
        Weights.parse(document)

    assert named in str(caught.value)
    assert "sk-" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "No such file"),
        (b'{"keys": {"sk-secret": 1', "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"keys": {"sk-secret": 1, "sk-secret": 2}}', "twice"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_without_showing_it(tmp_path, text, reason):
    file = tmp_path / "weights.json"
    if text is not None:
        file.write_bytes(text)

    with pytest.raises(WeightsError, match=reason) as caught:
        Weights.load(str(file))

    assert str(file) in str(caught.value)
    assert "sk-" not in str(caught.value)
