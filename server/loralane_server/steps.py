"""One step's input from rows, and its output read back: pure functions."""

from collections.abc import Sequence

import numpy as np

from loralane_server.device.seam import StepInput, StepOutput
from loralane_server.rows import OutToken, Row

#: A row and how many of its tokens the step computes.
Part = tuple[Row, int]

#: JSON has no infinity and no NaN (`max` keeps its first of the two): the log-probability of an
#: impossible token, and of any where an adapter's numbers overflow, is reported as this.
_LOWEST = float(np.finfo(np.float32).min)


def in_step_order(parts: Sequence[Part]) -> list[Part]:
    """Sort parts as a step takes them: single tokens first, among these adapters before base."""
    return sorted(parts, key=lambda part: (part[1] > 1, not part[0].lane_pages))


def sampled_rows(parts: Sequence[Part]) -> list[tuple[int, Row]]:
    """Return the rows whose last token a step computes, each with its span: they are sampled."""
    return [(i, row) for i, (row, n) in enumerate(parts) if n == row.pending]


def build_step(parts: Sequence[Part]) -> StepInput:
    """Lay the rows' tokens side by side.

    parts: in the order of `in_step_order` (see `StepInput`).
    """
    tokens = [token for row, n in parts for token in row.inputs(n)]
    positions = [np.arange(row.computed, row.computed + n, dtype=np.int32) for row, n in parts]
    ends = np.cumsum([n for _, n in parts]) - 1
    sampled = sampled_rows(parts)
    admissions = [row.admission for _, row in sampled]
    wanted = [a.logprobs for a in admissions if a.logprobs is not None]
    return StepInput(
        tokens=np.array(tokens, dtype=np.int32),
        positions=np.concatenate(positions),
        spans=[row.span(n) for row, n in parts],
        sample_at=ends[[i for i, _ in sampled]].astype(np.int32),
        sampling=[a.sampling for a in admissions],
        top_logprobs=max(wanted) if wanted else None,
    )


def read_token(output: StepOutput, sample: int, logprobs: int | None) -> OutToken:
    """Return one sample's token, with as many log-probabilities as its row asked for."""
    token = int(output.tokens[sample])
    if logprobs is None or output.logprobs is None:
        return OutToken(token)
    top: tuple[tuple[int, float], ...] = ()
    if output.top_ids is not None and output.top_logprobs is not None:
        ids = output.top_ids[sample, :logprobs].tolist()
        values = output.top_logprobs[sample, :logprobs].tolist()
        top = tuple((i, max(_LOWEST, v)) for i, v in zip(ids, values, strict=True))
    return OutToken(token, max(_LOWEST, float(output.logprobs[sample])), top)
