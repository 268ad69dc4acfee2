"""One case from its line to its verdict; servers are kept while the next case wants the same."""

import asyncio
import contextlib
import copy
import itertools
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import httpx

from tests.cases import (
    checks_answer,
    checks_output,
    checks_server,
    checks_shape,
    checks_text,
    sentences,
)
from tests.cases.aftermath import Run, learn, watched
from tests.cases.base import EOS
from tests.cases.case import Case
from tests.cases.expect import Scope, failures
from tests.cases.hub_script import read_repo, write_cache
from tests.cases.materialise import default_adapter
from tests.cases.server import CannotServe, Server, ServerSpec, read_spec, serving
from tests.cases.steps import Steps
from tests.cases.tensors import NotUnderstood
from tests.cases.wire import chat_ids, encode

#: Importing them registers their checks.
CHECKS: Final = (checks_answer, checks_output, checks_server, checks_shape, checks_text, sentences)
CASE_S: Final = 240


@dataclass(frozen=True)
class Verdict:
    """How a case ended, and why where it did not pass."""

    outcome: Literal["pass", "fail", "skip"]
    reasons: tuple[str, ...] = ()


class Runner:
    """Runs cases one after another. A new server replaces the old one."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._spec: ServerSpec | None = None
        self._server: Server | None = None
        self._fresh = False
        self._refusal: CannotServe | None = None
        self._numbers = itertools.count()

    def run(self, case: Case) -> Verdict:
        """Return the verdict on one case; nothing that a case does raises."""
        try:
            case.check()
            spec = spec_of(case)
            server = self._serve(case, spec)
            wrong = asyncio.run(self._judge(case, spec, server))
        except NotUnderstood as exc:
            return Verdict("fail", (f"runner does not understand {exc}",))
        except CannotServe as exc:
            outcome: Literal["skip", "fail"] = "skip" if may_skip(case, exc) else "fail"
            return Verdict(outcome, (f"the server does not start so: {exc}",))
        except TimeoutError:
            return Verdict("fail", (f"not done in {CASE_S} s",))
        except httpx.HTTPError as exc:
            self.close()
            return Verdict("fail", (f"the server is gone: {type(exc).__name__} {exc}",))
        return Verdict("fail", tuple(wrong)) if wrong else Verdict("pass")

    def close(self) -> None:
        """Stop the server, if there is one."""
        self._stack.close()
        self._spec = self._server = self._refusal = None

    def _serve(self, case: Case, spec: ServerSpec) -> Server:
        if spec != self._spec:
            self.close()
            tmp = Path(tempfile.mkdtemp(prefix="cases-"))
            self._stack.callback(shutil.rmtree, tmp, ignore_errors=True)
            fill = partial(_fill_cache, case)
            self._spec = spec
            try:
                self._server = self._stack.enter_context(serving(spec, tmp, fill))
                self._fresh = True
            except CannotServe as exc:
                self._refusal = exc
        if self._refusal is not None:
            raise self._refusal
        assert self._server is not None
        return self._server

    async def _judge(self, case: Case, spec: ServerSpec, server: Server) -> list[str]:
        folder = server.root / f"c{next(self._numbers)}"
        self._prepare(case, server, folder)
        health = "parallel_health_latency_s_max" in json.dumps(case.expected)
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(base_url=server.url, timeout=150, limits=limits) as http,
            asyncio.timeout(CASE_S),
        ):
            steps = Steps(_armed(case), server, http, folder)
            steps.base = spec.base
            if self._fresh:
                await learn(steps)
                self._fresh = False
            run = await watched(steps, health=health)
        return _judged(case, run)

    def _prepare(self, case: Case, server: Server, folder: Path) -> None:
        for name, adapter in case.adapters.items():
            adapter.below(str(server.tmp)).write(folder / name)
        for directory in case.setup.get("cwd_dirs", ()):
            (server.tmp / "cwd" / directory).mkdir(parents=True, exist_ok=True)
        outside = case.setup.get("outside")
        if outside is not None:
            path, _, what = outside.replace("$TMP", str(server.tmp)).partition("/(")
            if what != "a valid adapter)":
                raise NotUnderstood(f"outside {outside!r}")
            default_adapter(1).write(Path(path))
        repos = case.setup.get("hub", {})
        server.hub.install(
            {name: read_repo(name, entry, case.named, case.id) for name, entry in repos.items()}
        )


def _fill_cache(case: Case, cache: Path) -> None:
    write_cache(case.setup.get("hub_cache", {}), case.named, cache, case.id)


def _judged(case: Case, run: Run) -> list[str]:
    wrong = failures(case.expected, Scope(run, run.replies))
    return list(dict.fromkeys(wrong))


def may_skip(case: Case, why: CannotServe) -> bool:
    """Whether a server that does not start so lacks a feature, or this machine does."""
    if "cache_fs" in case.setup and str(why).startswith(("unshare:", "mount:")):
        return True  # no file systems of one's own here
    if "loralane: " not in str(why) and "error: " not in str(why):
        return False  # it did not refuse these settings, it broke
    server = case.setup.get("server", {})
    is_optional = bool(server.get("skip_if_unsupported")) or "backend" in server
    return is_optional or "skip_if" in case.expected


def spec_of(case: Case) -> ServerSpec:
    """Return the server that a case needs, scripted if its base is. Raises NotUnderstood."""
    spec = read_spec(case.setup, case.max_rank)
    script = _script(case.setup)
    if not script:
        return spec
    prompts = dict.fromkeys(_prompts(case, spec.base.template))
    return replace(spec, base=replace(spec.base, script=script, prompts=tuple(prompts)))


def _script(setup: Any) -> tuple[int, ...]:
    """The ids that the base must say, then EOS."""
    if "scripted_output" in setup:
        return (*setup["scripted_output"].encode(), EOS)
    if "scripted_output_hex" in setup:
        return (*bytes.fromhex(setup["scripted_output_hex"]), EOS)
    if "scripted_output_ids" in setup:
        return (*setup["scripted_output_ids"], EOS)
    return ()


def _prompts(case: Case, template: str | None) -> Iterator[tuple[int, ...]]:
    for body in _bodies(list(case.request)):
        text = body.get("inputs", body.get("prompt"))
        if isinstance(text, str):
            yield encode(text)
        elif "messages" in body and template is not None:
            yield chat_ids(body["messages"], template)


def _bodies(value: Any) -> Iterator[dict[str, Any]]:
    """All requests in a case's steps, however deep."""
    if isinstance(value, dict):
        if "prompt" in value or "inputs" in value or "messages" in value:
            yield value
        for item in value.values():
            yield from _bodies(item)
    elif isinstance(value, list):
        for item in value:
            yield from _bodies(item)


def _armed(case: Case) -> Case:
    """Give the first request the case's fault; ask for what the expectation has to see."""
    request = copy.deepcopy(list(case.request))
    for fault in case.setup.get("faults", ()):
        name, _, count = fault.partition(":")
        if name != "engine_error_after_tokens":
            raise NotUnderstood(f"fault {fault!r}")
        request[0]["_fault"] = int(count)
    expected = json.dumps(case.expected)
    for body in _bodies(request):
        if "inputs" in body and "prompt_tokens" in expected:
            body["parameters"] = {"details": True, **(body.get("parameters") or {})}
        elif "model" in body and '"output' in expected:
            body.setdefault("temperature", 0)  # else the default samples, and nothing compares
    return replace(case, request=tuple(request))


def ordered(cases: Sequence[Case]) -> list[Case]:
    """Return the cases so that those which share a server are neighbours, else as they stand."""
    groups: dict[object, list[Case]] = {}
    for case in cases:
        try:
            key: object = spec_of(case)
        except NotUnderstood:
            key = case.id
        groups.setdefault(key, []).append(case)
    return [case for group in groups.values() for case in group]
