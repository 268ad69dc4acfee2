"""The whole little world: every item, and how often each kind of question is asked."""

import random
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import chain

from demo import small_talk, topics
from demo.items import Item
from demo.mixture import Mixture
from demo.unknown import big_sum, unknown_item

WEIGHTS = {
    "animal": 26, "country": 17, "sum": 13, "opposite": 5, "time": 5, "job": 7, "space": 3,
    "colour": 3, "thing": 5, "food": 3, "computer": 3, "chat": 9, "story": 6, "language": 7,
}  # fmt: skip


@cache
def all_items() -> tuple[Item, ...]:
    """Every known question of the world, in a fixed order."""
    return tuple(
        chain(
            topics.animals(), topics.countries(), topics.jobs(), topics.things(),
            small_talk.small_talk(), small_talk.calendar(), small_talk.opposites(),
            small_talk.colours(), small_talk.sums(), small_talk.stories(),
        )
    )  # fmt: skip


def draw(rng: random.Random, count: int, mixture: Mixture) -> Iterator[Item]:
    """Draw items: a category by its weight, then evenly inside the category.

    Inside a category every item is used once before any is used twice, so that rare facts
    are not left to luck.
    """
    pools: dict[str, list[Item]] = defaultdict(list)
    for item in all_items():
        pools[item.category].append(item)
    waiting: dict[str, list[Item]] = {name: [] for name in pools}
    names, weights = [*WEIGHTS, "unknown"], [*WEIGHTS.values(), mixture.unknown]
    for category in rng.choices(names, weights, k=count):
        if category == "unknown":
            big = rng.random() < mixture.big_sums
            yield big_sum(rng, mixture.sum_from) if big else unknown_item(rng)
            continue
        if not waiting[category]:
            waiting[category] = rng.sample(pools[category], len(pools[category]))
        yield waiting[category].pop()
