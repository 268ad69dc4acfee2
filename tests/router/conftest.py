"""A small honest shard, and routers in front of it.

The model is arithmetic: the next token is (last token + the adapter's increment) mod 260; base adds
1. Ids 0 to 255 are bytes, so "a" continues with "bcd"; 256 is BOS, 257 is EOS.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import grpc
import grpc.aio
import pytest
from loralane_proto import shard_pb2 as pb
from loralane_proto import shard_pb2_grpc
from loralane_router.config import RouterConfig
from loralane_router.router import Router
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

VOCAB, BOS, EOS = 260, 256, 257
#: Without it a gRPC server hangs up on a router that pings an idle stream.
PINGS_ARE_WELCOME = (("grpc.http2.min_ping_interval_without_data_ms", 200),)
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"


def byte_alphabet() -> list[str]:
    """The characters that byte-level tokenizers write for bytes 0 to 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [
        chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)
    ]


def byte_tokenizer() -> Tokenizer:
    vocab = {char: byte for byte, char in enumerate(byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ("<s>", "</s>", "<|user|>", "<|assistant|>")
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    return tokenizer


def tokenizer_files() -> dict[str, bytes]:
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    return {
        "tokenizer.json": byte_tokenizer().to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }


@dataclass
class FakeAdapter:
    increment: int
    lanes: int = 8
    #: Required of whoever resolves it; "" = public.
    token: str = ""
    #: Steps that a load takes, 10 ms each.
    cold_steps: int = 0
    #: Fails every row that uses it.
    broken: pb.Error | None = None
    digest: str = ""
    pinned: bool = False
    resident: bool = False
    ttl_s: float = 0.0


@dataclass
class FakeRow:
    admission: pb.Admission
    last: int
    made: int = 0
    waited: int = 0
    #: Of its prompt, as its first message says.
    cached_tokens: int = 0
    #: Owned; none before its first token and while it is stopped.
    pages: int = 0
    end: "pb.FinishReason.ValueType" = pb.FINISH_REASON_UNSPECIFIED
    error: pb.Error | None = None

    @property
    def tokens(self) -> int:
        """Of its prompt and of its answer so far: what its next step has computed."""
        return len(self.admission.prompt) + self.made


@dataclass
class FakeShard(shard_pb2_grpc.ShardServicer):
    """Steps by itself while it has rows, or with `manual` only when `step` is called.

    Rows take pages as they grow. When there are too few, the youngest rows are stopped: they give
    theirs back, and go on with the token that was due when the older ones leave them enough.
    """

    adapters: dict[str, FakeAdapter] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=tokenizer_files)
    rows_total: int = 4
    pages_total: int = 64
    page_tokens: int = 4
    lanes_total: int = 32
    max_model_len: int = 64
    eos: int = EOS
    manual: bool = False
    #: So many admissions are refused although there is room.
    refusals: int = 0

    def __post_init__(self) -> None:
        self.port = 0
        self.rows: dict[int, FakeRow] = {}
        #: The digests of the rows of every step.
        self.batches: list[list[str]] = []
        self.admissions: list[pb.Admission] = []
        self.cancels: list[int] = []
        self.file_requests = 0
        #: Of the stream that is open.
        self.admitted = 0
        #: How often a row was stopped because pages ran out.
        self.stops = 0
        #: What the router admitted beyond capacity.
        self.violations: list[str] = []
        self.resolved: list[tuple[str, str]] = []
        self.merges: list[pb.Merge] = []
        self.listings: list[pb.ListAdaptersRequest] = []
        self.prefetched: list[str] = []
        #: Digests that were unloaded and not resolved since: rows of theirs fail.
        self.unloaded: set[str] = set()
        #: Digests that rows of another router use.
        self.used_by_others: set[str] = set()
        self.news = asyncio.Condition()
        self._server: grpc.aio.Server | None = None
        self._steps = 0
        self._told: pb.Capacity | None = None
        self._permits = asyncio.Semaphore(0)
        for reference, adapter in self.adapters.items():
            adapter.digest = adapter.digest or f"digest-of-{reference}"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = grpc.aio.server(options=PINGS_ARE_WELCOME)
        self.add_services(self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    def add_services(self, server: grpc.aio.Server) -> None:
        shard_pb2_grpc.add_ShardServicer_to_server(self, server)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    def step(self, steps: int = 1) -> None:
        for _ in range(steps):
            self._permits.release()

    async def until(self, holds: Callable[["FakeShard"], bool]) -> None:
        """Return when something is true of this shard; it is looked at after every message."""
        async with self.news:
            await self.news.wait_for(lambda: holds(self))

    async def Info(self, request, context):
        return pb.InfoReply(
            model_id="org/counter",
            architecture="Counter",
            dtype="int",
            device="abacus",
            vocab_size=VOCAB,
            max_model_len=self.max_model_len,
            eos_token_ids=[self.eos],
            capacity=self.capacity(),
            version="1",
            aliases=[pb.Alias(name=n, reference=r) for n, r in self.aliases.items()],
        )

    async def TokenizerFiles(self, request, context):
        for name, data in self.files.items():
            for start in range(0, len(data), 1000):
                yield pb.FileChunk(name=name, data=data[start : start + 1000])
        async with self.news:
            self.file_requests += 1
            self.news.notify_all()

    async def ResolveAdapter(self, request, context):
        if request.HasField("merge"):
            return await self._resolve_merge(request.merge, request.token, context)
        return self.described(await self._found(request.reference, request.token, context))

    async def _found(self, asked: str, token: str, context) -> str:
        self.resolved.append((asked, token))
        reference = self.aliases.get(asked, asked)
        adapter = self.adapters.get(reference)
        if adapter is None:
            await _abort(context, pb.ERROR_KIND_NOT_FOUND, f"no adapter {asked!r}")
        if adapter.token not in ("", token):
            await _abort(context, pb.ERROR_KIND_FORBIDDEN, "this token does not reach it")
        self.unloaded.discard(adapter.digest)
        return reference

    async def _resolve_merge(self, merge: pb.Merge, token: str, context) -> pb.Adapter:
        """Several adapters as one count up by the weighted sum of their increments."""
        self.merges.append(merge)
        found = [await self._found(member.reference, token, context) for member in merge.members]
        increment = sum(
            self.adapters[reference].increment * member.weight
            for reference, member in zip(found, merge.members, strict=True)
        )
        name = f"merge:{merge.strategy}({'+'.join(found)})"
        self.adapters[name] = FakeAdapter(int(increment), digest=f"digest-of-{name}")
        return self.described(name)

    async def LoadAdapter(self, request, context):
        reference = self.reference_of(request.digest)
        if request.digest in self.unloaded:
            await _abort(context, pb.ERROR_KIND_NOT_FOUND, "it is not known here")
        adapter = self.adapters[reference]
        adapter.resident = True
        if request.HasField("ttl_s"):
            adapter.ttl_s = request.ttl_s
        return self.described(reference)

    async def UnloadAdapter(self, request, context):
        adapter = self.adapters[self.reference_of(request.digest)]
        if request.digest in self.unloaded:
            await _abort(context, pb.ERROR_KIND_NOT_FOUND, "it is not known here")
        if request.digest in self.used_by_others:
            await _abort(context, pb.ERROR_KIND_IN_USE, "rows use it")
        self.unloaded.add(request.digest)
        freed = adapter.lanes if adapter.resident else 0
        adapter.resident = adapter.pinned = False
        return pb.UnloadAdapterReply(freed_host_bytes=1000, freed_lanes=freed)

    async def PinAdapter(self, request, context):
        reference = self.reference_of(request.digest)
        adapter = self.adapters[reference]
        others = sum(a.lanes for a in self.adapters.values() if a.pinned and a is not adapter)
        if request.pinned and adapter.broken is not None:
            await _abort(context, adapter.broken.kind, adapter.broken.message)
        if request.pinned and others + adapter.lanes > self.lanes_total:
            await _abort(context, pb.ERROR_KIND_OVERLOADED, "no free lanes")
        adapter.pinned = request.pinned
        adapter.resident = True
        return self.described(reference)

    async def ListAdapters(self, request, context):
        self.listings.append(request)
        known = [r for r, adapter in self.adapters.items() if adapter.digest not in self.unloaded]
        described = sorted(map(self.described, known), key=lambda adapter: adapter.digest)
        if request.digests:
            page = [adapter for adapter in described if adapter.digest in request.digests]
        else:
            page = [adapter for adapter in described if adapter.digest > request.after]
            page = page[: request.limit or None]
        return pb.ListAdaptersReply(adapters=page, total=len(described))

    async def ValidateAdapter(self, request, context):
        adapter = self.adapters.get(request.reference)
        if adapter is None or adapter.broken is not None:
            error = pb.Error(kind=pb.ERROR_KIND_NOT_FOUND, message="there is none")
            return pb.ValidateAdapterReply(error=adapter.broken if adapter else error)
        notes = ["its tensors were read"] if request.tensors else []
        return pb.ValidateAdapterReply(adapter=self.described(request.reference), notes=notes)

    async def Run(self, request_iterator, context):
        self.rows.clear()
        self.admitted = 0
        self._told = None
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            while True:
                await self.until(lambda shard: bool(shard.rows) or shard.capacity() != self._told)
                if self.rows and self.manual:
                    await self._permits.acquire()
                reply = self._one_step() if self.rows else self._news([], [])
                if reply.rows or reply.capacity != self._told:
                    self._told = reply.capacity
                    yield reply
                async with self.news:
                    self.news.notify_all()
        finally:
            reader.cancel()

    async def _read(self, requests) -> None:
        async for request in requests:
            async with self.news:
                for admission in request.admit:
                    self._admit(admission)
                self.prefetched += request.prefetch
                for request_id in request.cancel:
                    self.cancels.append(request_id)
                    if request_id in self.rows:
                        self.rows[request_id].end = pb.FINISH_REASON_CANCELLED
                self.news.notify_all()

    def _admit(self, admission: pb.Admission) -> None:
        self.admissions.append(admission)
        self.admitted += 1
        row = FakeRow(admission, admission.prompt[-1])
        self.rows[admission.request_id] = row
        for free in ("rows_free", "lanes_free"):
            if self._free()[free] < 0:
                self.violations.append(f"{free} for request {admission.request_id}")
        if admission.digest in self.unloaded:
            row.end = pb.FINISH_REASON_ERROR
            row.error = pb.Error(kind=pb.ERROR_KIND_NOT_FOUND, message="it is not known here")
        if self._pages(len(admission.prompt) + admission.max_tokens) > self.pages_total:
            row.end = pb.FINISH_REASON_ERROR
            row.error = pb.Error(kind=pb.ERROR_KIND_INVALID_REQUEST, message="it cannot be held")
        if self.refusals:
            self.refusals -= 1
            row.end = pb.FINISH_REASON_ERROR
            row.error = pb.Error(kind=pb.ERROR_KIND_OVERLOADED, message="no room after all")

    def _one_step(self) -> pb.StepReply:
        self._steps += 1
        self.batches.append([row.admission.digest for row in self.rows.values()])
        self._share_pages()
        replies = [self._advance(row) for row in self.rows.values()]
        self.rows = {
            request_id: row
            for request_id, row in self.rows.items()
            if row.end == pb.FINISH_REASON_UNSPECIFIED
        }
        changed = [
            pb.Residency(digest=row.admission.digest, tier=pb.TIER_DEVICE)
            for row in self.rows.values()
            if row.admission.digest and row.made == 1
        ]
        return self._news(replies, changed)

    def _news(self, rows: list[pb.Row], changed: list[pb.Residency]) -> pb.StepReply:
        return pb.StepReply(
            step=self._steps,
            rows=rows,
            residency=changed,
            capacity=self.capacity(),
            admitted=self.admitted,
        )

    def _share_pages(self) -> None:
        """Give each row the pages of its next step, the oldest first; who gets none is stopped."""
        free = self.pages_total
        for row in self.rows.values():
            if row.end != pb.FINISH_REASON_UNSPECIFIED or self._is_loading(row):
                continue
            needed = self._pages(row.tokens)
            self.stops += needed > free and row.pages > 0
            row.pages = needed if needed <= free else 0
            free = free - needed if needed <= free else 0

    def _advance(self, row: FakeRow) -> pb.Row:
        admission = row.admission
        reply = pb.Row(request_id=admission.request_id)
        adapter = self._adapter(admission.digest)
        if row.end == pb.FINISH_REASON_UNSPECIFIED and adapter.broken is not None:
            row.end, row.error = pb.FINISH_REASON_ERROR, adapter.broken
        if row.end == pb.FINISH_REASON_UNSPECIFIED:
            if self._is_loading(row):
                row.waited += 1
                return reply
            if not row.pages:
                return reply
            if not row.made:
                reply.cold_ms = 10.0 * row.waited
                reply.cached_tokens = row.cached_tokens
            adapter.resident, adapter.cold_steps = True, 0
            self._next_token(row, reply, adapter.increment)
        reply.finish_reason = row.end
        if row.error is not None:
            reply.error.CopyFrom(row.error)
        return reply

    def _next_token(self, row: FakeRow, reply: pb.Row, increment: int) -> None:
        admission = row.admission
        row.last = (row.last + increment) % VOCAB
        row.made += 1
        token = reply.tokens.add(id=row.last)
        if admission.want_logprobs:
            token.logprob = -0.5
        for rank in range(admission.top_logprobs):
            token.top.add(id=(row.last + rank) % VOCAB, logprob=-0.5 - rank)
        if row.last in admission.stop_token_ids:
            row.end = pb.FINISH_REASON_STOP_TOKEN
        elif row.made == admission.max_tokens:
            row.end = pb.FINISH_REASON_LENGTH

    def capacity(self) -> pb.Capacity:
        free = {name: max(0, number) for name, number in self._free().items()}
        return pb.Capacity(
            rows_total=self.rows_total,
            pages_total=self.pages_total,
            page_tokens=self.page_tokens,
            pending_tokens=sum(1 if row.pages else row.tokens for row in self.rows.values()),
            lanes_total=self.lanes_total,
            lanes_in_use=self.lanes_total - free["lanes_free"],
            **free,
        )

    def _free(self) -> dict[str, int]:
        rows = list(self.rows.values())
        digests = {row.admission.digest for row in rows if row.admission.digest}
        held = digests | {a.digest for a in self.adapters.values() if a.pinned}
        return {
            "rows_free": self.rows_total - len(rows),
            "pages_free": self.pages_total - sum(row.pages for row in rows),
            "lanes_free": self.lanes_total - sum(self._adapter(d).lanes for d in held),
        }

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def _is_loading(self, row: FakeRow) -> bool:
        return row.waited < self._adapter(row.admission.digest).cold_steps

    def reference_of(self, digest: str) -> str:
        return next(r for r, adapter in self.adapters.items() if adapter.digest == digest)

    def _adapter(self, digest: str) -> FakeAdapter:
        if not digest:
            return FakeAdapter(increment=1, lanes=0)
        return self.adapters[self.reference_of(digest)]

    def described(self, reference: str) -> pb.Adapter:
        adapter = self.adapters[reference]
        return pb.Adapter(
            digest=adapter.digest,
            reference=reference,
            tier=pb.TIER_DEVICE if adapter.resident else pb.TIER_DISK,
            rank=adapter.lanes,
            lanes=adapter.lanes,
            bytes=100 * adapter.lanes,
            targets=2,
            modules=["q_proj", "v_proj"],
            rows=sum(row.admission.digest == adapter.digest for row in self.rows.values()),
            pinned=adapter.pinned,
            ttl_s=adapter.ttl_s,
        )


async def _abort(context, kind, message: str) -> None:
    error = pb.Error(kind=kind, message=message)
    trailer = (("loralane-error-bin", error.SerializeToString()),)
    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, message, trailer)


@pytest.fixture
def good_tokenizer_files() -> dict[str, bytes]:
    return tokenizer_files()


StartShard = Callable[..., Awaitable[FakeShard]]
StartRouter = Callable[..., Awaitable[Router]]


@pytest.fixture
async def start_shard() -> AsyncIterator[StartShard]:
    """Start a `FakeShard` with the given fields; adapters as name=FakeAdapter fields' dicts."""
    shards: list[FakeShard] = []

    async def start(adapters: dict[str, dict] | None = None, **fields) -> FakeShard:
        made = {name: FakeAdapter(**settings) for name, settings in (adapters or {}).items()}
        shard = FakeShard(adapters=made, **fields)
        shards.append(shard)
        await shard.start()
        return shard

    yield start
    for shard in shards:
        await shard.stop()


@pytest.fixture
async def start_router() -> AsyncIterator[StartRouter]:
    """Start a router in front of shards and wait until it has so many of them, or all."""
    routers: list[Router] = []

    async def start(*shards: FakeShard, wait_for: int | None = None, **settings) -> Router:
        router = Router(RouterConfig(shards=tuple(s.address for s in shards), **settings))
        routers.append(router)
        await router.start()
        count = len(shards) if wait_for is None else wait_for
        await asyncio.wait_for(router.fleet.until(lambda f: len(f.ready_links) >= count), 10)
        return router

    yield start
    for router in routers:
        await router.close()
