"""Traffic of several tenants: sent at given times, or as fast as answers come. Nothing is lost.

Every call becomes one `Answer`, also those that were refused, that broke, or that were still
unfinished when the traffic was called off.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from types import MappingProxyType
from typing import Final

import msgspec

from bench.load import Work
from bench.promises import NotMeasured
from bench.stream import Asked, Client, Event, Refused, Reply, StreamFailed

_PATH: Final = "/v1/completions"
_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})
_PAUSE_S: Final = 0.1
#: The status of an answer that never came or was cut off, and of one that we called off.
BROKEN, CALLED_OFF = 0, -1


@dataclass(frozen=True, slots=True)
class Call:
    """One request to send."""

    tenant: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one call; times by `perf_counter`."""

    tenant: str
    sent: float
    ended: float
    #: HTTP's, BROKEN or CALLED_OFF.
    status: int
    #: When each event with a token came.
    times: tuple[float, ...] = ()
    #: As the server counts; None where the stream has not come to its end.
    counted: int | None = None
    text: str = ""

    @property
    def first(self) -> float:
        """Time to first token, seconds; infinite if there was none."""
        return self.times[0] - self.sent if self.times else inf

    @property
    def complete(self) -> bool:
        """Whether it came to its end."""
        return self.counted is not None

    @property
    def tokens_of_an_event(self) -> float:
        """More than 1 where the server held back tokens; 1 for a stream without its end."""
        return self.counted / len(self.times) if self.counted and self.times else 1.0


class NothingServed(NotMeasured):
    """No request was answered, so that nothing can be measured; the message has the statuses."""


class _Choice(msgspec.Struct):
    text: str = ""


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


def read(tenant: str, sent: float, events: Sequence[Event], status: int = BROKEN) -> Answer:
    """Return what a stream's events say; `status` is that of one without usage at its end.

    An error among the events is an event without choices, after which no usage comes.
    """
    times: list[float] = []
    text: list[str] = []
    counted: int | None = None
    for at, data in events:
        event = msgspec.json.decode(data, type=_Event)
        if event.choices:
            times.append(at)
            text.append(event.choices[0].text)
        if event.usage is not None:
            counted, status = event.usage.completion_tokens, 200
    return Answer(tenant, sent, time.perf_counter(), status, tuple(times), counted, "".join(text))


async def ask(client: Client, call: Call, events: list[Event] | None = None) -> Answer:
    """Send one call now; `events` are filled while they come, for whoever may cancel this."""
    events = [] if events is None else events
    sent = time.perf_counter()
    try:
        sent, _ = await client.follow(_PATH, call.body, events, call.headers)
    except Refused as exc:
        return _answer(call, sent, events, exc.reply)
    except (StreamFailed, OSError):
        pass  # it was cut off: what came before says how far
    return read(call.tenant, sent, events)


def _answer(call: Call, sent: float, events: Sequence[Event], outcome: Reply | Exception) -> Answer:
    if isinstance(outcome, Reply) and outcome.text is not None:
        return Answer(call.tenant, outcome.sent, outcome.ended, outcome.status)
    return read(call.tenant, sent, events)


class Fresh:
    """Makes calls: the tenant's name is the model's, and no prompt is sent twice."""

    def __init__(
        self,
        work: Work,
        headers: Mapping[str, str] = _NO_HEADERS,
        *,
        each_token: bool = True,
        first_seed: int = 0,
        spread: int = 0,
    ) -> None:
        """`spread`: how many tokens an answer may be longer or shorter than the work's."""
        self._work = work
        self._headers = headers
        #: Log-probabilities make our server send an event for each token: none is held back.
        self._end = b', "logprobs": 0}' if each_token else b"}"
        self._seeds = count(first_seed)
        self._draw, self._spread = random.Random(first_seed), spread

    def __call__(self, tenant: str) -> Call:
        """Return the next call of a tenant."""
        more = self._draw.randint(-self._spread, self._spread)
        body = self._work.body(tenant, next(self._seeds), self._work.new_tokens + more)
        return Call(tenant, body[:-1] + self._end, self._headers)


def poisson(rate: float, seconds: float, seed: int) -> list[float]:
    """Return arrival times within so many seconds; the same seed gives the same times."""
    draw, at, times = random.Random(seed), 0.0, []
    while rate > 0 and (at := at + draw.expovariate(rate)) < seconds:
        times.append(at)
    return times


def together(tenants: Mapping[str, Sequence[float]]) -> list[tuple[float, str]]:
    """Return the arrivals of all tenants in the order of time."""
    return sorted((at, tenant) for tenant, times in tenants.items() for at in times)


class Traffic:
    """Calls under way, and the answers to those that ended."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._under_way: dict[Asked, tuple[Call, list[Event]]] = {}
        self._none_left = asyncio.Event()
        self._none_left.set()
        #: In the order in which they ended.
        self.answers: list[Answer] = []

    @property
    def under_way(self) -> int:
        """Calls that have no answer yet."""
        return len(self._under_way)

    def send(self, call: Call) -> None:
        """Send a call; its answer is found in `answers` later."""
        events: list[Event] = []

        def tell(outcome: Reply | Exception) -> None:
            del self._under_way[asked]
            self.answers.append(_answer(call, asked.sent, events, outcome))
            if not self._under_way:
                self._none_left.set()

        asked = self._client.ask(_PATH, call.body, events, tell, call.headers)
        self._under_way[asked] = call, events
        self._none_left.clear()

    async def offer(
        self, arrivals: Iterable[tuple[float, str]], make: Callable[[str], Call]
    ) -> None:
        """Send what `make` makes of each tenant's name at its time after now, whatever comes."""
        began = time.perf_counter()
        for at, tenant in arrivals:
            # A generator that is late sends at once, and stays as late as it must.
            await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
            self.send(make(tenant))

    async def finish(self, within_s: float) -> None:
        """Wait for all answers for so long, then call off what is left."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._none_left.wait(), within_s)
        self.call_off()

    def call_off(self) -> None:
        """End what is under way: its connections close, and its answers are unfinished ones."""
        for asked, (call, events) in self._under_way.items():
            asked.call_off()
            self.answers.append(read(call.tenant, asked.sent, events, CALLED_OFF))
        self._under_way.clear()
        self._none_left.set()


async def closed_loop(
    client: Client, tenants: Sequence[str], make: Callable[[str], Call], seconds: float
) -> list[Answer]:
    """Keep one call of each named tenant under way for so long; then wait for the last answers.

    A tenant that is named twice has two calls under way. What the last calls' tokens count for is
    the reader's to decide: they come after the time is over.
    """
    end = time.perf_counter() + seconds
    answers: list[Answer] = []

    async def work(tenant: str) -> None:
        while time.perf_counter() < end:
            answers.append(await ask(client, make(tenant)))
            if not answers[-1].complete:
                await asyncio.sleep(_PAUSE_S)  # nobody asks a server that refuses without end

    await asyncio.gather(*map(work, tenants))
    return answers


class CpuShare:
    """This process's CPU seconds per second since it was made: what the generator itself takes."""

    def __init__(self) -> None:
        self._began, self._used = time.perf_counter(), time.process_time()

    @property
    def share(self) -> float:
        """Of one core."""
        return (time.process_time() - self._used) / (time.perf_counter() - self._began)
