from pathlib import Path

from tpu.hbm import Traffic, traffic
from tpu.hlo import parse

STANDIN = Path(__file__).with_name("standin.hlo")
KIB = 1024


def of(*lines: str, fused: str = "", paged: frozenset[tuple[int, ...]] = frozenset()) -> Traffic:
    """Traffic of an entry of these lines; the last one is its result."""
    *before, root = lines
    entry = "\n".join([*(f"  {line}" for line in before), f"  ROOT {root}"])
    text = f"HloModule m\n\n{fused}\nENTRY %main (p: f32[8]) -> f32[8] {{\n{entry}\n}}\n"
    return traffic(parse(text), paged)


def test_a_compiled_graph_moves_what_one_counts_by_hand() -> None:
    moved = traffic(parse(STANDIN.read_text()))

    tokens, weight, part, indices = 64 * KIB, 4096 * KIB, 32 * KIB, 512
    loop = 2048 * KIB  # one layer of the stack; how often, this compiler does not say
    counters = 4 * 4  # the loop's
    assert moved.read == tokens + weight + part + part + 2 * indices + loop + counters
    assert moved.written == part + part + 2 * 4
    assert moved.loops == 1


def test_a_prefetch_is_counted_where_it_begins_and_its_use_is_free() -> None:
    moved = of(
        "%p = bf16[1024,1024]{1,0} parameter(0)",
        "%s = (bf16[1024,1024]{1,0:S(1)}, bf16[1024,1024]{1,0}, u32[]{:S(2)}) copy-start(%p)",
        "%d = bf16[1024,1024]{1,0:S(1)} copy-done(%s)",
        "%n = bf16[1024,1024]{1,0:S(1)} negate(%d)",
    )

    assert moved == Traffic(read=2048 * KIB, written=0)


def test_a_prefetched_slice_counts_as_the_slice() -> None:
    moved = of(
        "%p = bf16[1024,1024]{1,0} parameter(0)",
        "%s = ((bf16[1024,1024]{1,0}), bf16[512,1024]{1,0:S(1)}, u32[]{:S(2)}) "
        "slice-start(%p), slice={[0:512], [0:1024]}",
        "%d = bf16[512,1024]{1,0:S(1)} slice-done(%s)",
    )

    assert moved == Traffic(read=1024 * KIB, written=0)


def test_a_fusion_that_only_slices_reads_the_slice() -> None:
    fused = (
        "%body (a: bf16[1024,1024]) -> bf16[8,1024] {\n"
        "  %a = bf16[1024,1024]{1,0} parameter(0)\n"
        "  %b = bf16[1024,1024]{1,0} bitcast(%a)\n"
        "  ROOT %s = bf16[8,1024]{1,0} slice(%b), slice={[0:8], [0:1024]}\n"
        "}\n"
    )

    moved = of(
        "%p = bf16[1024,1024]{1,0} parameter(0)",
        "%f = bf16[8,1024]{1,0} fusion(%p), kind=kLoop, calls=%body",
        fused=fused,
    )

    assert moved == Traffic(read=16 * KIB, written=16 * KIB)


def test_a_fusion_that_slices_and_also_takes_the_whole_reads_it_once() -> None:
    fused = (
        "%body (a: bf16[1024,1024]) -> bf16[1024,1024] {\n"
        "  %a = bf16[1024,1024]{1,0} parameter(0)\n"
        "  %s = bf16[8,1024]{1,0} slice(%a), slice={[0:8], [0:1024]}\n"
        "  ROOT %r = bf16[1024,1024]{1,0} custom-call(%a, %s)\n"
        "}\n"
    )

    moved = of(
        "%p = bf16[1024,1024]{1,0} parameter(0)",
        "%f = bf16[1024,1024]{1,0:S(1)} fusion(%p), kind=kLoop, calls=%body",
        fused=fused,
    )

    assert moved.read == 2048 * KIB


def test_an_update_in_place_counts_what_it_changes() -> None:
    moved = of(
        "%p = bf16[1024,1024]{1,0} parameter(0)",
        "%u = bf16[8,1024]{1,0:S(1)} parameter(1)",
        "%at = s32[]{:S(4)} parameter(2)",
        "%r = bf16[1024,1024]{1,0} dynamic-update-slice(%p, %u, %at, %at)",
    )

    assert moved == Traffic(read=16 * KIB, written=16 * KIB)


def test_a_copy_counts_both_ways() -> None:
    moved = of("%p = bf16[1024,1024]{1,0} parameter(0)", "%c = bf16[1024,1024]{0,1} copy(%p)")

    assert moved == Traffic(read=2048 * KIB, written=2048 * KIB)


def test_pages_that_a_kernel_fetches_from_are_not_counted_as_read_whole() -> None:
    lines = (
        "%q = bf16[16,1024]{1,0} parameter(0)",
        "%kv = bf16[65,16,16,128]{3,2,1,0} parameter(1)",
        '%k = bf16[16,1024]{1,0:S(1)} custom-call(%q, %kv), custom_call_target="tpu_custom_call"',
    )

    assert of(*lines, paged=frozenset({(65, 16, 16, 128)})).read == 32 * KIB
    assert of(*lines).read == 32 * KIB + 65 * 64 * KIB


def test_a_loop_counts_as_often_as_it_runs() -> None:
    fused = (
        "%body (t: (bf16[1024,1024])) -> (bf16[1024,1024]) {\n"
        "  %t = (bf16[1024,1024]{1,0}) parameter(0)\n"
        "  %g = bf16[1024,1024]{1,0} get-tuple-element(%t), index=0\n"
        "  %n = bf16[1024,1024]{1,0:S(1)} negate(%g)\n"
        "  ROOT %r = (bf16[1024,1024]{1,0}) tuple(%g)\n"
        "}\n"
    )
    loop = "%w = (bf16[1024,1024]{1,0}) while(%t), condition=%c, body=%body"
    lines = (
        "%p = bf16[1024,1024]{1,0} parameter(0)",
        "%t = (bf16[1024,1024]{1,0}) tuple(%p)",
    )

    seven = of(*lines, f'{loop}, backend_config={{"known_trip_count":{{"n":"7"}}}}', fused=fused)

    assert seven == Traffic(read=7 * 2048 * KIB)
    assert of(*lines, loop, fused=fused) == Traffic(read=2048 * KIB, loops=1)
