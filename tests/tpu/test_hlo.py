from pathlib import Path

import pytest

from tpu.hlo import HBM, Module, Shape, parse

STANDIN = Path(__file__).with_name("standin.hlo")


def one_line(line: str) -> Module:
    return parse(f"HloModule m\n\nENTRY %main (p: f32[8]) -> f32[8] {{\n  ROOT {line}\n}}\n")


def test_a_compiled_module_is_read_with_its_memory_spaces_and_aliases() -> None:
    module = parse(STANDIN.read_text())

    prefetch = module.entry.instructions["copy-start"]
    assert module.aliases == {2: 1}
    assert [shape.space for shape in prefetch.shapes] == [1, HBM, 2]
    assert prefetch.operands == ("Arg_1.2",)
    assert module.entry.parameter(5).shapes[0].dims == (3, 1024, 1024)
    assert module.entry.root.operands == ("copy-done.1", "fusion.1")


def test_what_loops_run_is_executed_and_what_fusions_hold_is_not() -> None:
    executed = [it.op for it in parse(STANDIN.read_text()).executed()]

    assert executed.count("while") == 1
    assert executed.count("fusion") == 8
    assert "convolution" not in executed


@pytest.mark.parametrize(
    ("layout", "nbytes"),
    [
        ("bf16[16,2048]{1,0:T(8,128)(2,1)}", 16 * 2048 * 2),
        ("bf16[3,100]{1,0:T(8,128)(2,1)}", 8 * 128 * 2),
        ("bf16[3,100]{0,1:T(8,128)(2,1)}", 104 * 128 * 2),
        ("s32[16]{0:T(128)}", 128 * 4),
        ("f32[]{:T(128)}", 4),
        ("pred[5,7]", 35),
    ],
)
def test_sizes_are_those_of_the_padded_tiles(layout: str, nbytes: int) -> None:
    (shape,) = one_line(f"%p = {layout} parameter(0)").entry.root.shapes

    assert shape.nbytes == nbytes


def test_the_shapes_of_nested_tuples_are_read_in_order() -> None:
    module = one_line(
        "%s = ((bf16[8,128]{1,0:T(8,128)(2,1)}), f32[4]{0:T(128)S(1)}, u32[]{:S(2)}) "
        'slice-start(%p.1), slice={[0:4]}, metadata={op_name="a(b)"}'
    )

    assert module.entry.root.shapes == (
        Shape("bf16", (8, 128), HBM, (8, 128), (1, 0)),
        Shape("f32", (4,), 1, (128,), (0,)),
        Shape("u32", (), 2, (), ()),
    )
    assert module.entry.root.operands == ("p.1",)


def test_a_loop_tells_its_trips_if_the_compiler_does() -> None:
    line = "%w = s32[] while(%t), condition=%c, body=%b"
    known = ', backend_config={"known_trip_count":{"n":"7"}}'

    assert one_line(line).entry.root.trips is None
    assert one_line(line + known).entry.root.trips == 7
    assert one_line(line + known).entry.root.called == "b"


def test_text_without_an_entry_is_refused() -> None:
    with pytest.raises(ValueError, match="ENTRY"):
        parse("HloModule m\n")
