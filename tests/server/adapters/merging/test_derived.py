"""Merges as adapters: identity, what can be merged, and layers made of the members' files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from loralane_server.adapters.merging.derived import Merge
from loralane_server.adapters.merging.merging import STRATEGIES, recipe_of
from loralane_server.adapters.reading.reader import LayerTensors
from loralane_server.adapters.store.store import AdapterStore
from loralane_server.device.seam import ENDS
from loralane_server.errors import (
    AdapterIncompatible,
    AdapterNotFound,
    AdapterTooLarge,
    InvalidRequest,
    ShardError,
)
from peft.utils import merge_utils
from torch import Tensor

from tests.server.adapters.samples import adapter_files, lora, store_at, values, write

SCALE = 2.0


def digests(store: AdapterStore, *names: str) -> tuple[str, ...]:
    return tuple(store.resolve(name).result().digest for name in names)


def merge(
    members: tuple[str, ...], strategy: str = "cat", *weights: float, density: float = 0.5
) -> Merge:
    return Merge(recipe_of(strategy, weights or (0.5,) * len(members), density, "total"), members)


def layers(store: AdapterStore, digest: str) -> dict[int, LayerTensors]:
    found: list[LayerTensors] = []
    store.load(digest, found.append).result()
    return {tensors.layer: tensors for tensors in found}


def half(layer: int, module: str, ab: str, shape: tuple[int, int], seed: int) -> Tensor:
    """A tensor of the samples' adapters."""
    block = (
        "mlp" if module in ("gate_proj", "up_proj", "down_proj", "gate_up_proj") else "self_attn"
    )
    name = f"base_model.model.model.layers.{layer}.{block}.{module}.lora_{ab}.weight"
    return torch.from_numpy(values(name, shape, seed))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Plain adapters: `a` and `b` on q and v, `late` on k of layer 1, `wide` of rank 16."""
    write(tmp_path / "a", adapter_files(lora(seed=1)))
    write(tmp_path / "b", adapter_files(lora(seed=2)))
    write(tmp_path / "late", adapter_files(lora(["k_proj"], [1], seed=3)))
    write(tmp_path / "wide", adapter_files(lora(rank=16, seed=4), r=16, lora_alpha=32))
    return tmp_path


def test_a_merge_is_described_without_reading_a_tensor(root):
    store = store_at(root)
    members = digests(store, "a", "late")

    summary = store.merge(merge(members, "cat", 0.5, -1.5)).result()

    assert summary.reference == "merge:cat(a*0.5+late*-1.5)"
    assert (summary.kind, summary.rank, summary.targets) == ("merge", 4, 5)
    assert summary.modules == ("k_proj", "q_proj", "v_proj")
    assert summary.bytes == sum(store.summary(member).bytes for member in members)
    assert store.bytes_read == 0
    assert summary.digest in [each.digest for each in store.list()[0]]
    store.check()


def test_names_tell_what_the_strategy_uses(root):
    store = store_at(root)
    members = digests(store, "a", "b")
    recipe = recipe_of("ties", (1, 2), 0.25, "frequency")

    ties = store.merge(Merge(recipe, members)).result()
    many = store.merge(merge(members * 4, "cat", *[1 / 3] * 8)).result()

    assert ties.reference == "merge:ties(a*1.0+b*2.0;density=0.25;majority_sign=frequency)"
    assert len(many.reference) <= 240


def test_a_long_name_is_shortened_to_what_is_unique(root):
    long = ["x" * 200, "y" * 200]
    for seed, name in enumerate(long):
        write(root / name, adapter_files(lora(seed=seed)))
    store = store_at(root)
    asked = merge(digests(store, *long))

    summary = store.merge(asked).result()

    assert summary.reference == f"merge:cat(2 adapters;{asked.digest[:16]})"


def test_the_digest_is_of_members_and_recipe(root):
    store = store_at(root)
    a, b, late = digests(store, "a", "b", "late")
    ties = [recipe_of("ties", (0.5, 0.5), d, s) for d, s in ((0.5, "total"), (0.5, "frequency"))]

    merges = [
        merge((a, b)),
        merge((b, a)),
        merge((a, late)),
        merge((a, b), "cat", 0.5, 0.25),
        merge((a, b), "linear"),
        merge((a, b), "ties", density=0.25),
        *(Merge(recipe, (a, b)) for recipe in ties),
        merge((a,)),
    ]

    assert len({each.digest for each in merges}) == len(merges)
    assert len({a, b, late} & {each.digest for each in merges}) == 0
    assert merge((a, b), "cat", density=0.1).digest == merge((a, b), "cat", density=0.9).digest


def test_the_same_merge_is_made_once(root):
    store = store_at(root)
    asked = merge(digests(store, "a", "b"))

    first = store.merge(asked).result()
    again = store.merge(asked).result()

    assert again is first
    assert store.list()[1] == 3


def test_a_replaced_member_makes_another_merge_and_the_old_one_stays_itself(root):
    store = store_at(root)
    asked = merge(digests(store, "a", "b"))
    old = store.merge(asked).result()
    layers(store, old.digest)
    write(root / "new", adapter_files(lora(seed=7)))
    (root / "new" / "adapter_model.safetensors").replace(root / "b" / "adapter_model.safetensors")

    new = store.merge(merge(digests(store, "a", "b"))).result()

    assert new.digest != old.digest
    assert new.reference == old.reference
    b = layers(store, new.digest)[0].targets["q_proj"].b
    torch.testing.assert_close(b[4:], half(0, "q_proj", "B", (64, 4), 7).T * SCALE * 0.5)


def test_a_merge_can_be_loaded_when_its_members_were_unloaded(root):
    store = store_at(root)
    members = digests(store, "a", "b")
    made = store.merge(merge(members)).result()
    before = layers(store, made.digest)[1].targets["q_proj"]
    for digest in (*members, made.digest):
        store.unload(digest)

    after = layers(store, made.digest)[1].targets["q_proj"]

    assert store.tier(made.digest) == "host"
    assert [each.digest for each in store.list()[0]] == [made.digest]
    assert torch.equal(before.a, after.a)
    assert torch.equal(before.b, after.b)
    store.check()


def test_a_merge_is_read_once_for_all_who_want_it(root):
    store = store_at(root)
    made = store.merge(merge(digests(store, "a", "b"))).result()

    loads = [store.load(made.digest, lambda tensors: None) for _ in range(16)]
    for load in loads:
        load.result()

    assert store.bytes_read == made.bytes


def test_cat_lays_members_side_by_side_with_weight_and_scale_in_b(root):
    store = store_at(root)
    made = store.merge(merge(digests(store, "a", "wide"), "cat", 0.5, -3.0)).result()

    q = layers(store, made.digest)[1].targets["q_proj"]

    assert made.rank == 20
    torch.testing.assert_close(q.a[:4], half(1, "q_proj", "A", (4, 64), 1))
    torch.testing.assert_close(q.a[4:], half(1, "q_proj", "A", (16, 64), 4))
    torch.testing.assert_close(q.b[:4], half(1, "q_proj", "B", (64, 4), 1).T * SCALE * 0.5)
    torch.testing.assert_close(q.b[4:], half(1, "q_proj", "B", (64, 16), 4).T * SCALE * -3.0)


@pytest.mark.parametrize("strategy", ["linear", "cat"])
def test_members_count_with_their_own_scale_and_layers_in_any_order(root, strategy):
    config = {"use_rslora": True, "layers_to_transform": [1], "lora_alpha": 6}
    write(root / "rs", adapter_files(lora(layers=[1], seed=8), **config))
    store = store_at(root)
    orders = (("a", "rs"), ("rs", "a"))
    made = [store.merge(merge(digests(store, *names), strategy)).result() for names in orders]

    products = [
        [tensors.targets["q_proj"] for n, tensors in layers(store, each.digest).items() if n >= 0]
        for each in made
    ]

    for first, second in zip(*products, strict=True):
        torch.testing.assert_close(first.b.T @ first.a, second.b.T @ second.a)
    if strategy == "cat":
        rs = half(1, "q_proj", "B", (64, 4), 8) @ half(1, "q_proj", "A", (4, 64), 8)
        own = products[0][1]
        torch.testing.assert_close(own.b[4:].T @ own.a[4:], 0.5 * 6 / 4**0.5 * rs)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_member_without_a_target_takes_no_part_in_it(root, strategy):
    store = store_at(root)
    made = store.merge(merge(digests(store, "a", "late"), strategy, density=1.0)).result()

    found = layers(store, made.digest)

    assert sorted(found) == [ENDS, 0, 1]
    assert found[ENDS].targets == {}
    assert sorted(found[0].targets) == ["q_proj", "v_proj"]
    assert sorted(found[1].targets) == ["k_proj", "q_proj", "v_proj"]
    k = found[1].targets["k_proj"]
    expected = 0.5 * SCALE * half(1, "k_proj", "B", (32, 4), 3) @ half(1, "k_proj", "A", (4, 64), 3)
    torch.testing.assert_close(k.b.T @ k.a, expected)


def test_what_dare_draws_depends_on_the_members_and_not_on_the_weights(root):
    store = store_at(root)
    members = digests(store, "a", "b")
    # Two weights of one member: what is kept of it is where values are not zero.
    made = [
        store.merge(merge((members[0], members[0]), "dare_linear", weight, 0.0, density=0.3))
        for weight in (1.0, 4.0)
    ]

    first, second = (layers(store, each.result().digest)[0].targets["q_proj"].a for each in made)

    assert 0 < int((first == 0).sum()) < first.numel()
    assert torch.equal(first == 0, second == 0)
    seeds = {
        merge(members).seed(layer, module, ab)
        for layer in (0, 1)
        for module in ("q_proj", "v_proj")
        for ab in "AB"
    } | {merge(members[::-1]).seed(0, "q_proj", "A")}
    assert len(seeds) == 9


def test_every_store_makes_the_same_numbers(root):
    made = []
    for store in (store_at(root), store_at(root)):
        torch.manual_seed(len(made))
        merged = store.merge(merge(digests(store, "a", "b"), "dare_ties")).result()
        made.append((merged.digest, layers(store, merged.digest)[1].targets["v_proj"].b))

    assert made[0][0] == made[1][0]
    assert torch.equal(made[0][1], made[1][1])


def test_a_linear_that_all_have_fused_is_pruned_as_a_whole(tmp_path):
    shapes = {"A": (4, 64), "B": (128, 4)}  # q 64, k and v 32 rows
    for seed, name in ((1, "a"), (2, "b")):
        tensors = {
            f"base_model.model.model.layers.0.self_attn.qkv_proj.lora_{ab}.weight": (
                "F32",
                shape,
                half(0, "qkv_proj", ab, shape, seed).numpy().tobytes(),
            )
            for ab, shape in shapes.items()
        }
        write(tmp_path / name, adapter_files(tensors, target_modules=["qkv_proj"]))
    store = store_at(tmp_path)
    made = store.merge(merge(digests(store, "a", "b"), "ties", density=0.3)).result()

    targets = layers(store, made.digest)[0].targets

    roots = torch.tensor([(0.5 * SCALE) ** 0.5] * 2)
    fused = {
        ab: merge_utils.ties([half(0, "qkv_proj", ab, shape, n) for n in (1, 2)], roots, 0.3)
        for ab, shape in shapes.items()
    }
    rows = dict(zip(("q_proj", "k_proj", "v_proj"), fused["B"].split([64, 32, 32]), strict=True))
    assert sorted(targets) == sorted(rows)
    for module, expected in rows.items():
        assert torch.equal(targets[module].a, fused["A"])
        assert torch.equal(targets[module].b, expected.T)


@pytest.mark.parametrize("strategy", ["linear", "ties", "dare_linear", "dare_ties"])
def test_ranks_that_differ_are_refused_with_both_and_the_way_out(root, strategy):
    store = store_at(root)

    error = failure(store, merge(digests(store, "a", "wide"), strategy))

    assert isinstance(error, AdapterIncompatible)
    assert f"{strategy} merges adapters of one rank" in error.message
    assert "a is of rank 4 and wide of rank 16" in error.message
    assert "the strategy cat" in error.message
    assert "model.layers.0.self_attn.q_proj" in error.message


def test_adapters_of_other_ranks_that_share_no_linear_can_be_merged(root):
    write(root / "mlp", adapter_files(lora(["up_proj"], rank=16, seed=5), r=16, lora_alpha=32))
    store = store_at(root)

    made = store.merge(merge(digests(store, "a", "mlp"), "linear")).result()

    assert made.rank == 16


def test_a_sum_of_ranks_that_does_not_fit_is_refused_with_the_rank(root):
    store = store_at(root, max_rank=32)

    fits = store.merge(merge(digests(store, "wide", "wide"))).result()
    error = failure(store, merge(digests(store, "wide", "wide", "a")))

    assert fits.rank == 32
    assert isinstance(error, AdapterTooLarge)
    assert "rank 36" in error.message


@pytest.mark.parametrize(
    ("config", "extra", "shape", "why"),
    [
        ({"use_dora": True}, "lora_magnitude_vector", (64,), "DoRA's magnitudes"),
        ({"lora_bias": True}, "lora_B.bias", (64,), "biases"),
    ],
)
def test_adapters_that_are_more_than_lora_are_refused_by_name(root, config, extra, shape, why):
    tensors = lora(["q_proj"], [0])
    name = f"base_model.model.model.layers.0.self_attn.q_proj.{extra}"
    tensors[name] = ("F32", shape, (values(name, shape) + 1).tobytes())
    write(root / "more", adapter_files(tensors, **config))
    store = store_at(root)

    error = failure(store, merge(digests(store, "a", "more")))

    assert isinstance(error, AdapterIncompatible)
    assert "more cannot be merged" in error.message
    assert why in error.message


def test_a_density_that_keeps_nothing_is_refused_as_it_would_be_the_base(root):
    store = store_at(root)
    members = digests(store, "a", "b")  # the smaller half of the larger target has 4 x 64 values

    kept = store.merge(merge(members, "ties", density=1.01 / 256)).result()
    error = failure(store, merge(members, "ties", density=0.99 / 256))

    assert any(target.b.any() for target in layers(store, kept.digest)[0].targets.values())
    assert isinstance(error, InvalidRequest)
    assert "keeps no value" in error.message


def test_an_adapter_that_replaces_a_table_is_refused_by_name(root):
    head = {"base_model.model.lm_head.weight": ("F32", (260, 64), bytes(260 * 64 * 4))}
    write(root / "table", adapter_files(lora() | head, modules_to_save=["lm_head"]))
    store = store_at(root)

    error = failure(store, merge(digests(store, "a", "table")))

    assert isinstance(error, AdapterIncompatible)
    assert "table cannot be merged: it replaces rows of the embedding or the head" in error.message


def test_a_table_beside_lora_that_is_not_the_bases_own_fails_the_load(root):
    head = {
        f"base_model.model.lm_head.{name}": ("F32", shape, values(name, shape).tobytes())
        for name, shape in (
            ("lora_A.weight", (4, 64)),
            ("lora_B.weight", (260, 4)),
            ("base_layer.weight", (260, 64)),
        )
    }
    write(root / "table", adapter_files(lora() | head, target_modules=["q_proj", "lm_head"]))
    store = store_at(root)
    made = store.merge(merge(digests(store, "a", "table"))).result()

    with pytest.raises(AdapterIncompatible, match="table brings its own lm_head"):
        layers(store, made.digest)


def test_a_member_that_was_never_resolved_is_not_found(root):
    store = store_at(root)

    with pytest.raises(AdapterNotFound):
        store.merge(merge((*digests(store, "a"), "0" * 64)))


def test_the_name_of_a_merge_is_no_reference(root):
    store = store_at(root)
    made = store.merge(merge(digests(store, "a", "b"))).result()

    with pytest.raises(ShardError):
        store.resolve(made.reference).result()


def test_a_member_that_is_not_finite_fails_the_load_and_names_it(root):
    tensors = lora(seed=6)
    name = next(name for name in tensors if "layers.1" in name)
    dtype, shape, content = tensors[name]
    tensors[name] = (dtype, shape, b"\x00\x00\xc0\x7f" + content[4:])
    write(root / "nan", adapter_files(tensors))
    store = store_at(root)
    made = store.merge(merge(digests(store, "a", "nan"))).result()

    with pytest.raises(ShardError) as caught:
        layers(store, made.digest)

    assert "nan" in caught.value.message
    assert "not finite" in caught.value.message


def failure(store: AdapterStore, asked: Merge) -> Any:
    error = store.merge(asked).exception()
    store.check()
    return error
