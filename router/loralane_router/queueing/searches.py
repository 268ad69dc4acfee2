"""Adapters that went between resolving and admission: their requests resolve them once more."""

import asyncio
import logging
from collections.abc import Callable

from loralane_proto import shard_pb2 as pb

from loralane_router.adapters.facts import AdapterFacts
from loralane_router.errors import RequestError
from loralane_router.queueing.entry import Entry

_log = logging.getLogger(__name__)

#: `Dispatcher.needed_pages`.
NeededPages = Callable[[int, int, AdapterFacts], int]


class Searches:
    """Requests of one shard that neither wait nor run: their adapters are asked for again.

    Owned by the roster. A search that ends by itself hands its request to `on_end`; one that is
    given up hands it to nobody.
    """

    def __init__(self, needed_pages: NeededPages, on_end: Callable[[Entry], None]) -> None:
        self._needed_pages = needed_pages
        self._on_end = on_end
        self._under_way: dict[int, tuple[Entry, asyncio.Task[None]]] = {}

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._under_way

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(self, entry: Entry) -> None:
        """Resolve a request's adapter once more; what fails now is the request's end."""
        task = asyncio.create_task(self._find(entry), name="resolve-again")
        self._under_way[entry.ask.request_id] = entry, task

    def give_up(self, request_id: int) -> bool:
        """Stop looking for a request's adapter; return whether that was under way."""
        if request_id not in self._under_way:
            return False
        _, task = self._under_way.pop(request_id)
        task.cancel()
        return True

    def look_for(self, digest: str) -> bool:
        """Whether a request looks for what this adapter was."""
        return any(entry.ask.digest == digest for entry, _ in self._under_way.values())

    async def _find(self, entry: Entry) -> None:
        request_id = entry.ask.request_id
        try:
            facts = await entry.find_adapter_again()
            entry.readdress(facts, self._needed_pages(*entry.tokens, facts))
        except RequestError as error:
            entry.generation.fail(error)
        except Exception:
            _log.exception("request %d: its adapter cannot be resolved again", request_id)
            entry.generation.fail(RequestError(pb.ERROR_KIND_INTERNAL, "resolving again failed"))
        del self._under_way[request_id]
        self._on_end(entry)
