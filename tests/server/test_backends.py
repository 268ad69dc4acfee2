"""Which device a shard computes on, and in what."""

from importlib.util import find_spec

import pytest
from loralane_server.backends import choose_device, page_numbers
from loralane_server.config import ShardConfig
from loralane_server.errors import ModelUnsupported
from loralane_server.model.spec import model_spec

HAS_XLA = find_spec("torch_xla") is not None
without_xla = pytest.mark.skipif(HAS_XLA, reason="torch_xla is installed here")
with_xla = pytest.mark.skipif(not HAS_XLA, reason="needs torch_xla")


def test_the_cpu_is_used_unless_there_is_a_tpu() -> None:
    assert choose_device(ShardConfig(), {}) == "cpu"
    assert choose_device(ShardConfig(), {"PJRT_DEVICE": "CPU"}) == "cpu"
    assert choose_device(ShardConfig(device="cpu"), {"PJRT_DEVICE": "TPU"}) == "cpu"


@with_xla
def test_a_tpu_is_used_where_there_is_one() -> None:
    assert choose_device(ShardConfig(), {"PJRT_DEVICE": "TPU"}) == "xla"
    assert choose_device(ShardConfig(device="xla"), {}) == "xla"


@without_xla
def test_a_tpu_is_not_used_by_itself_without_torch_xla() -> None:
    assert choose_device(ShardConfig(), {"PJRT_DEVICE": "TPU"}) == "cpu"


@without_xla
def test_xla_without_torch_xla_is_refused_with_what_to_install() -> None:
    with pytest.raises(ModelUnsupported, match=r"pip install 'loralane\[xla\]'"):
        choose_device(ShardConfig(device="xla"), {})


def test_a_page_of_a_cpu_has_keys_and_values_of_its_tokens_and_nothing_else() -> None:
    spec = model_spec(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 100,
            "max_position_embeddings": 64,
        }
    )

    assert page_numbers(ShardConfig(device="cpu"), spec) == 16 * 2 * 2 * 64
