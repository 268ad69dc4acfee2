"""Merges answer as PEFT's `add_weighted_adapter` does, beside their members and the base."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from loralane_server.adapters.merging.derived import Merge
from loralane_server.adapters.merging.merging import Recipe, recipe_of
from loralane_server.assembly import Shard
from loralane_server.config import ShardConfig
from loralane_server.device.seam import ENDS
from loralane_server.rows import Admission
from peft import PeftModel
from peft.utils import merge_utils

from tests import reference
from tests.server.conftest import digest_of, running

pytestmark = pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`")

TOKENS = 32
ADAPTERS = (
    reference.AdapterRecipe("all", 8, 16),
    reference.AdapterRecipe("qv", 8, 4, ("q_proj", "v_proj"), layers=(1, 2)),
    reference.AdapterRecipe("rs", 8, 4, rslora=True),
    reference.AdapterRecipe("ends", 8, 12, ("v_proj", "embed_tokens", "lm_head")),
    reference.AdapterRecipe("head", 8, 8, ("q_proj", "lm_head")),
    reference.AdapterRecipe("r4", 4, 8),
    reference.AdapterRecipe("r16", 16, 32, ("q_proj", "k_proj", "up_proj", "down_proj")),
    reference.AdapterRecipe("pattern", 16, 32, rank_pattern=(("q_proj", 3), ("down_proj", 24))),
)


@dataclass(frozen=True)
class Asked:
    """What a request says."""

    members: tuple[str, ...]
    recipe: Recipe


def asked(members: str, strategy: str, *weights: float, density: float = 0, sign: str = "total"):
    return Asked(tuple(members.split()), recipe_of(strategy, weights, density, sign))


MERGES = (
    asked("all rs", "linear", 0.5, 0.5),
    asked("all rs", "linear", 1.0, -0.6),
    asked("all qv rs", "linear", 0.4, 1.5, 0.3),
    asked("all", "linear", 0.5),
    asked("all rs", "ties", 0.7, 0.7, density=0.5),
    asked("all qv rs", "ties", 0.7, -2.0, 0.5, density=0.4, sign="frequency"),
    asked("all rs", "dare_linear", 0.7, 0.7, density=0.6),
    asked("all qv rs", "dare_ties", 0.7, 2.0, 0.7, density=0.6),
    asked("all qv rs", "dare_ties", 0.7, 2.0, 0.7, density=0.6, sign="frequency"),
    asked("ends head", "linear", 0.9, 0.4),
    asked("ends head all", "ties", 0.8, -0.5, 0.6, density=0.5),
    asked("ends head", "dare_ties", 0.8, 0.5, density=0.7),
    asked("head ends r16", "cat", 0.8, 0.5, 0.2),
    asked("r4 r16", "cat", 0.8, 0.5),
    asked("r4 pattern r16", "cat", 0.8, -0.5, 0.3),
)


#: Of a base whose checkpoint fuses linears, and its adapters with it.
FUSED_ADAPTERS = (
    reference.AdapterRecipe("all", 8, 16, ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    reference.AdapterRecipe("qkv", 8, 8, ("qkv_proj",)),
    reference.AdapterRecipe("rs", 8, 4, ("qkv_proj", "gate_up_proj"), rslora=True),
    reference.AdapterRecipe("r4", 4, 8, ("qkv_proj", "gate_up_proj")),
)
FUSED_MERGES = (
    asked("all qkv", "linear", 0.5, -0.8),
    asked("all qkv rs", "ties", 0.7, -2.0, 0.5, density=0.4),
    asked("all rs", "dare_linear", 0.6, 0.6, density=0.6),
    asked("all qkv rs", "dare_ties", 0.7, 2.0, 0.7, density=0.5, sign="frequency"),
    asked("all r4", "cat", 0.7, 0.5),
)


@dataclass(frozen=True)
class World:
    folder: Path
    model: Any
    prompts: list[list[int]]
    adapters: tuple[str, ...]
    merges: tuple[Asked, ...]

    @property
    def config(self) -> ShardConfig:
        return ShardConfig(
            model=str(self.folder / "model"),
            adapter_roots=(self.folder / "adapters",),
            dtype="float32",
            max_rows=32,
            lanes=512,
            step_tokens=48,
        )


@pytest.fixture(scope="module", params=["llama", "phi3"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    split = request.param == "llama"
    folder = tmp_path_factory.mktemp("merges")
    model: Any = reference.random_model(reference.FAMILIES["llama"] if split else reference.PHI3)
    reference.save_model(model, folder / "model")
    recipes = ADAPTERS if split else FUSED_ADAPTERS
    for seed, recipe in enumerate(recipes):
        reference.save_adapter(model, recipe, folder / "adapters" / recipe.name, seed=seed)
    rng = random.Random(11)
    prompts = [[rng.randrange(256) for _ in range(19)] for _ in range(2)]
    names = tuple(recipe.name for recipe in recipes)
    return World(folder, model, prompts, names, MERGES if split else FUSED_MERGES)


def merge_of(shard: Shard, request: Asked) -> Merge:
    return Merge(request.recipe, tuple(digest_of(shard, member) for member in request.members))


def by_peft(world: World, request: Asked, merge: Merge) -> list[list[int]]:
    """PEFT's tokens; its generator is seeded before each draw as ours is."""
    recipe = request.recipe
    folders = [world.folder / "adapters" / member for member in request.members]
    with reference.together(
        world.model,
        folders,
        recipe.weights,
        combination_type="linear" if recipe.draws else recipe.strategy,
        density=recipe.density,
        majority_sign_method=recipe.majority_sign,
    ) as adapted:
        if recipe.draws:
            draw(adapted, recipe, merge)
        return reference.continued(adapted, world.prompts, TOKENS)


def draw(adapted: PeftModel, recipe: Recipe, merge: Merge) -> None:
    """Put PEFT's DARE of each linear into the adapter `merged`."""
    combine = getattr(merge_utils, recipe.strategy)
    options = [recipe.density, *([recipe.majority_sign] if recipe.elects else [])]
    for path, linear in adapted.named_modules():
        halves = loras(linear)
        if "merged" not in halves["A"]:
            continue
        layer = int(path.split(".layers.")[1].split(".")[0]) if ".layers." in path else ENDS
        numbered = enumerate(recipe.weights)
        pairs = [(str(n), weight) for n, weight in numbered if str(n) in halves["A"]]
        factors = torch.tensor([weight * linear.scaling[name] for name, weight in pairs])
        roots = factors.abs().sqrt()
        for half, weights in (("A", roots * factors.sign()), ("B", roots)):
            torch.manual_seed(merge.seed(layer, path.split(".")[-1], half))
            tensors = [halves[half][name].data for name, _ in pairs]
            halves[half]["merged"].data = combine(tensors, weights, *options)


def loras(module: Any) -> dict[str, dict[str, torch.nn.Parameter]]:
    """A and B of each adapter of a linear or an embedding; none of other modules."""
    found: dict[str, dict[str, torch.nn.Parameter]] = {}
    for half in "AB":
        linears = getattr(module, f"lora_{half}", {})
        found[half] = {name: linears[name].weight for name in linears}
        found[half] |= dict(getattr(module, f"lora_embedding_{half}", {}))
    return found


def test_merges_answer_as_peft_beside_their_members_and_the_base(world: World) -> None:
    with running(world.config) as listener:
        store = listener.shard.store
        merges = [merge_of(listener.shard, request) for request in world.merges]
        digests = ["", *(digest_of(listener.shard, name) for name in world.adapters)]
        digests += [store.merge(merge).result().digest for merge in merges]
        batch = [(digest, prompt) for digest in digests for prompt in world.prompts]
        random.Random(3).shuffle(batch)
        produced = {}
        for begin in range(0, len(batch), 8):
            part = batch[begin : begin + 8]
            rows = [Admission(begin + i, d, tuple(p), TOKENS) for i, (d, p) in enumerate(part)]
            tokens = listener.generate(*rows)
            produced |= {(d, tuple(p)): t for (d, p), t in zip(part, tokens, strict=True)}
        store.check()

    folders = [None, *(world.folder / "adapters" / name for name in world.adapters)]
    expected = [reference.greedy(world.model, f, world.prompts, TOKENS) for f in folders]
    expected += [by_peft(world, *pair) for pair in zip(world.merges, merges, strict=True)]
    # Merges that answer like another adapter, or repeat one token, would prove nothing.
    flat = [tuple(answer) for answers in expected for answer in answers]
    assert len(set(flat)) == len(flat)
    assert sum(len(set(answer)) for answer in flat) > 8 * len(flat)
    wrong = [
        digest
        for digest, answers in zip(digests, expected, strict=True)
        for prompt, answer in zip(world.prompts, answers, strict=True)
        if produced[digest, tuple(prompt)] != answer
    ]
    assert wrong == []
