from pathlib import Path

from tpu.hlo import Module, parse
from tpu.structure import collectives, copies, host_transfers, kernels

STANDIN = Path(__file__).with_name("standin.hlo")
MIB = 1 << 20


def module(*lines: str, fused: str = "") -> Module:
    *before, root = lines
    entry = "\n".join([*(f"  {line}" for line in before), f"  ROOT {root}"])
    return parse(f"HloModule m\n\n{fused}\nENTRY %main (p: f32[8]) -> f32[8] {{\n{entry}\n}}\n")


def test_a_graph_without_any_of_it_has_none() -> None:
    standin = parse(STANDIN.read_text())

    assert collectives(standin) == {}
    assert kernels(standin) == 0
    assert host_transfers(standin) == ()
    assert copies(standin, MIB) == ()


def test_collectives_are_found_in_fusions_and_counted_once_when_they_take_two_lines() -> None:
    fused = (
        "%body (a: f32[8]) -> f32[8] {\n"
        "  %a = f32[8]{0} parameter(0)\n"
        "  ROOT %r = f32[8]{0} all-reduce(%a), to_apply=%sum\n"
        "}\n"
    )
    found = module(
        "%p = f32[8]{0} parameter(0)",
        "%f = f32[8]{0} fusion(%p), kind=kCustom, calls=%body",
        "%s = f32[8]{0} all-reduce-start(%f), to_apply=%sum",
        "%d = f32[8]{0} all-reduce-done(%s)",
        "%g = f32[16]{0} all-gather(%d), dimensions={0}",
        fused=fused,
    )

    assert collectives(found) == {"all-reduce": 2, "all-gather": 1}


def test_what_touches_the_host_is_named() -> None:
    found = module(
        "%p = f32[8]{0} parameter(0)",
        "%c = f32[8]{0:S(5)} copy(%p)",
        "%s = (f32[8]{0}, u32[], token[]) send(%p), channel_id=1",
    )

    assert host_transfers(found) == ("copy c", "send s")


def test_only_large_copies_from_hbm_to_hbm_count() -> None:
    found = module(
        "%p = f32[1024,1024]{1,0} parameter(0)",
        "%small = f32[8]{0} parameter(1)",
        "%in = f32[1024,1024]{1,0:S(1)} copy(%p)",
        "%out = f32[1024,1024]{1,0} copy(%in)",
        "%little = f32[8]{0} copy(%small)",
        "%whole = (f32[1024,1024]{0,1}, f32[1024,1024]{1,0}, u32[]{:S(2)}) copy-start(%p)",
        "%again = f32[1024,1024]{0,1} copy(%out)",
    )

    assert copies(found, 4 * MIB) == ("whole", "again")
    assert copies(found, 5 * MIB) == ()
    assert copies(found, 0) == ()
