"""Names that hold on every shard."""

import pytest
from loralane_proto import shard_pb2 as pb
from loralane_router.adapters.names import Names
from loralane_router.errors import RequestError


def served(**aliases: str) -> pb.InfoReply:
    given = [pb.Alias(name=name, reference=reference) for name, reference in aliases.items()]
    return pb.InfoReply(model_id="org/base", aliases=given)


@pytest.mark.parametrize("name", ["", "org/base", "base", "house"])
def test_the_base_has_several_names_and_an_alias_goes_before_them(name):
    names = Names("house")
    names.connect("a:1", served())
    before = names.is_base(name)

    names.connect("b:2", served(base="org/tuned", house="org/tuned"))

    assert before
    assert names.is_base(name) == (name not in ("base", "house"))


def test_a_given_name_goes_before_a_configured_one_and_is_sent_as_what_it_stands_for():
    names = Names(None)
    names.connect("a:1", served(mine="org/old"))

    names.add("mine", "org/new")
    names.add("yours", "mine")

    assert names.aliased("mine") == "org/new"
    assert [names.sent(name) for name in ("mine", "yours", "org/x")] == [
        "org/new",
        "org/new",
        "org/x",
    ]
    assert names.aliases() == {"mine", "yours"}


def test_an_alias_is_asked_only_of_shards_where_it_means_what_it_meant_first():
    names = Names(None)

    first = names.connect("a:1", served(mine="org/x", both="org/b"))
    second = names.connect("b:2", served(mine="org/y", both="org/b"))
    names.connect("c:3", served())

    assert (first, second) == ([], ["mine"])
    assert [names.means_the_same("mine", at) for at in ("a:1", "b:2", "c:3")] == [
        True,
        False,
        False,
    ]
    assert [names.means_the_same("both", at) for at in ("a:1", "b:2", "c:3")] == [True, True, False]
    assert names.means_the_same("org/z", "c:3")


def test_a_shard_that_comes_again_brings_its_new_aliases_and_keeps_its_place():
    names = Names(None)
    names.connect("a:1", served(mine="org/x"))
    names.connect("b:2", served(mine="org/x"))

    names.connect("a:1", served(mine="org/new"))

    assert names.aliased("mine") == "org/new"
    assert [names.means_the_same("mine", at) for at in ("a:1", "b:2")] == [True, False]


def test_a_shard_that_does_not_come_back_takes_its_aliases_along():
    names = Names(None)
    names.connect("a:1", served(mine="org/x"))
    names.connect("b:2", served(mine="org/y"))

    names.disconnect("a:1")
    names.disconnect("never-seen")

    assert names.aliased("mine") == "org/y"
    assert names.means_the_same("mine", "b:2")


def test_names_of_what_was_unloaded_are_forgotten():
    names = Names(None)
    names.add("mine", "org/x")
    names.add("kept", "org/y")

    names.forget(["org/x", "org/z"])

    assert names.aliases() == {"kept"}


@pytest.mark.parametrize("name", ["", "base", "a\nb", "x" * 257])
def test_some_names_cannot_be_given(name):
    names = Names(None)
    names.connect("a:1", served())

    with pytest.raises(RequestError) as caught:
        names.check_alias(name)

    assert (caught.value.status.http, caught.value.param) == (400, "name")
