from tests.tpu.handmade import result, without_lora
from tpu.gates import Result, judge
from tpu.records import Compiled
from tpu.table import markdown


def page(*results: Result) -> str:
    return markdown(results, judge(results), {"libtpu": "0.0.21"})


def test_the_page_says_that_nothing_ran() -> None:
    text = page(without_lora(), result())

    assert text.startswith("# Compiled for TPUs, not run on one\n")
    assert "libtpu 0.0.21." in text


def test_a_line_has_what_the_chip_holds_and_what_lora_adds() -> None:
    text = page(without_lora(), result(hbm_read=7200, flops=1.1e9))

    assert (
        "| llama-3.1-8b.decode-16.lanes-128 | v6e-1x1 | 12.0 | 21.00 | 31.24 | 0.00 GiB | 1.1 | "
        "0.00 | +2.00% bytes, +10.00% flops | 0 | 32 |"
    ) in text
    assert "## Gates: 13 hold, 0 fail" in text


def test_fewer_layers_than_the_model_has_are_named() -> None:
    assert "lanes-128, 4 layers |" in page(result({"layers": 4, "kernels": 4}))
    assert "layers |" not in page(result())


def test_a_refusal_has_no_figures() -> None:
    graph = {"name": "too-large", "expected": "refused"}
    refused = Compiled("too-large", "v6e-1x1", 8.0, "RESOURCE_EXHAUSTED: hbm | 41G")

    text = page(Result(result(graph).graph, refused))

    assert "| too-large | v6e-1x1 | 8.0 | refused | 31.24 |  |  |  |  |  |  |" in text
    assert "RESOURCE_EXHAUSTED: hbm / 41G" in text


def test_gates_that_fail_are_counted_and_marked() -> None:
    text = page(without_lora(), result(kernels=0))

    assert "## Gates: 12 hold, 1 fail" in text
    assert "**fails** | 0 of 32 |" in text
