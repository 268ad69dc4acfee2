"""A shard that takes its time to resolve adapters."""

import asyncio
from dataclasses import dataclass, field

from tests.router.conftest import FakeShard


@dataclass
class SlowShard(FakeShard):
    """Resolves when `may_resolve` is set."""

    may_resolve: asyncio.Event = field(default_factory=asyncio.Event)
    #: Those who wait for it.
    resolving: int = 0

    async def ResolveAdapter(self, request, context):
        async with self.news:
            self.resolving += 1
            self.news.notify_all()
        try:
            await self.may_resolve.wait()
        finally:
            self.resolving -= 1
            async with self.news:
                self.news.notify_all()
        return await super().ResolveAdapter(request, context)
