import pytest
from loralane_router.config import RouterConfig


def test_defaults_are_valid():
    config = RouterConfig(shards=("127.0.0.1:9000",))

    assert (config.max_queue, config.max_queue_tokens) == (1024, None)


@pytest.mark.parametrize(
    "shards",
    [("a:1", "b:2"), ("dns:shards.internal:8101",), ("unix:/run/a", "unix:/run/b:1", "[::1]:1")],
)
def test_shards_are_named_one_by_one_or_all_at_once(shards):
    assert RouterConfig(shards=shards).shards == shards


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"shards": ()}, "name a shard"),
        ({"shards": ("a:1", "a:1")}, "twice"),
        ({"shards": ("dns:shards",)}, "dns:NAME:PORT"),
        ({"shards": ("dns::8101",)}, "dns:NAME:PORT"),
        ({"shards": ("localhost",)}, "HOST:PORT"),
        ({"shards": ("localhost:70000",)}, "HOST:PORT"),
        ({"shards": ("http://localhost:8101",)}, "HOST:PORT"),
        ({"shards": ("unix:",)}, "unix:PATH"),
        ({"port": -1}, "port"),
        ({"grpc_port": 65536}, "grpc_port"),
        ({"log_format": "xml"}, "log_format"),
        ({"max_queue": -1}, "max_queue"),
        ({"max_queue_tokens": 0}, "max_queue_tokens"),
        ({"served_model_name": ""}, "served_model_name"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        RouterConfig(**({"shards": ("127.0.0.1:9000",)} | settings))
