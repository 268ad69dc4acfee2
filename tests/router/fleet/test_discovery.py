"""Which shards there are."""

import pytest
from loralane_router.fleet.discovery import Discovery, lookup


class Answers:
    """One answer after another for every name; an exception is raised."""

    def __init__(self, *answers) -> None:
        self._answers = list(answers)

    async def __call__(self, name: str, port: int) -> list[str]:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return [f"{host}:{port}" for host in answer]


async def test_given_addresses_are_asked_of_nobody():
    discovery = Discovery(["a:1", "unix:/run/shard"], Answers())

    await discovery.look()

    assert discovery.addresses == ("a:1", "unix:/run/shard")
    assert not discovery.asks


async def test_a_name_stands_for_all_its_addresses_in_order():
    discovery = Discovery(["dns:shards:7", "10.0.0.2:7"], Answers(["10.0.0.3", "10.0.0.2"], []))
    before = discovery.addresses

    await discovery.look()
    some = discovery.addresses
    await discovery.look()

    assert before == ("10.0.0.2:7",)
    assert some == ("10.0.0.2:7", "10.0.0.3:7")
    assert discovery.addresses == ("10.0.0.2:7",)
    assert discovery.asks


@pytest.mark.parametrize("failure", [OSError("no such name"), UnicodeError("label too long")])
async def test_a_failed_lookup_changes_nothing_and_is_said_once(failure, caplog):
    discovery = Discovery(["dns:shards:7"], Answers(["h"], failure, failure, ["h"], failure))

    for _ in range(3):
        await discovery.look()
    said = len(caplog.records)
    for _ in range(2):
        await discovery.look()

    assert discovery.addresses == ("h:7",)
    assert (said, len(caplog.records)) == (1, 2)


async def test_this_machines_resolver_knows_this_machine():
    assert "127.0.0.1:8101" in await lookup("127.0.0.1", 8101)
    assert "[::1]:8101" in await lookup("::1", 8101)
