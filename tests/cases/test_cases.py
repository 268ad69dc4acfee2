"""Every case of the dev file against the real server; `make cases CASES=FILE` runs another file."""

import json
import re
from collections.abc import Iterator

import pytest

from tests.cases.case import Case, read_cases
from tests.cases.run import DEFAULT
from tests.cases.runner import Runner, ordered
from tests.conftest import DeviceName

#: What the server does not do yet; a case that begins to pass must leave this table.
OPEN: dict[str, str] = {}
#: Seconds that a server's start and an ordinary case may take, on a busy machine.
_USUAL_S = 120


def patience(case: Case) -> float:
    """Return the bound of one case: more for those that wait for something long by their script."""
    waits = re.findall(
        r'"(?:hold_s|delay_s|for_s|s)": ([0-9.]+)', json.dumps([case.setup, case.request])
    )
    return _USUAL_S + sum(map(float, waits))


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    runner = Runner()
    yield runner
    runner.close()


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=case.id,
            marks=[
                pytest.mark.timeout(patience(case)),
                *([pytest.mark.xfail(reason=OPEN[case.id])] if case.id in OPEN else []),
            ],
        )
        for case in ordered(read_cases(DEFAULT))
    ],
)
def test_case(runner: Runner, case: Case, device: DeviceName) -> None:
    verdict = runner.run(case)

    if verdict.outcome == "skip":
        assert device != "xla", f"whoever asks for this device asks for this case: {verdict}"
        pytest.skip("; ".join(verdict.reasons))
    if verdict.outcome == "fail":
        pytest.fail("\n".join(verdict.reasons), pytrace=False)
