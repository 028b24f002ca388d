"""A server with the interface of OpenAI: chat and plain completions, whole or as a stream, and one page to chat on."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from .guide import ANY_JSON, Grammars, Guide
from .sampling import Sampling
from .service import Busy, Job, Service
from .tokenizer import Tokenizer

PAGE = Path(__file__).with_name("page.html")
LOCAL = ["localhost", "127.0.0.1", "[::1]"]
NOT_SERVED = {
    "n": 1,
    "best_of": 1,
    "logprobs": None,
    "top_logprobs": None,
    "tools": None,
    "functions": None,
    "echo": False,
}
READERS = 2  # prompts that are cut into tokens at the same time


class Refused(Exception):
    """What a client did wrong, or why it can't be served now."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Server:
    """The handlers of requests; `application` is what an ASGI server runs."""

    def __init__(
        self,
        service: Service,
        tokenizer: Tokenizer,
        name: str,
        *,
        longest: int,
        body: int = 1 << 20,
        key: str | None = None,
    ) -> None:
        self._service, self._tokenizer, self._name = service, tokenizer, name
        self._longest, self._body, self._key = longest, body, key
        self._grammars = Grammars(tokenizer, service.vocabulary)
        self._readers = asyncio.Semaphore(READERS)
        self._since = int(time.time())

    def application(self, hosts: list[str] | None = None) -> Starlette:
        """`hosts` are the names that clients may call this server by; by default any.

        A page of a stranger that a browser shows may call a local server by a name of its own.
        """
        routes = [
            Route("/", lambda _: HTMLResponse(PAGE.read_text(encoding="utf-8"))),
            Route("/v1/models", self._guarded(self._models)),
            Route("/v1/chat/completions", self._guarded(self._complete, chat=True), methods=["POST"]),
            Route("/v1/completions", self._guarded(self._complete, chat=False), methods=["POST"]),
        ]
        middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=hosts)] if hosts else []
        return Starlette(routes=routes, middleware=middleware, lifespan=self._living)

    @contextlib.asynccontextmanager
    async def _living(self, app: Starlette) -> AsyncIterator[None]:
        del app
        yield
        await run_in_threadpool(self._service.close)

    def _guarded(self, handler: Any, **options: Any) -> Any:
        """The handler with the key checked, and with refusals as OpenAI's clients expect them."""

        async def handle(request: Request) -> Response:
            try:
                given = request.headers.get("authorization", "")
                if self._key is not None and not hmac.compare_digest(given.encode(), f"Bearer {self._key}".encode()):
                    raise Refused(401, "give the key of this server as `Authorization: Bearer KEY`")
                return await handler(request, **options)
            except Refused as error:
                kind = {401: "authentication_error", 503: "overloaded_error"}.get(error.status, "invalid_request_error")
                content = {"error": {"message": str(error), "type": kind, "param": None, "code": None}}
                more = {"Retry-After": "1"} if error.status == 503 else {}
                return JSONResponse(content, status_code=error.status, headers=more)
            except ClientDisconnect:
                return Response(status_code=400)  # nobody reads it

        return handle

    async def _models(self, request: Request) -> Response:
        del request
        model = {"id": self._name, "object": "model", "created": self._since, "owned_by": "eformer"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _complete(self, request: Request, *, chat: bool) -> Response:
        body = await self._json(request)
        for name, only in NOT_SERVED.items():
            if body.get(name, only) not in (only, None, [], False):
                raise Refused(400, f"`{name}` is not served here: leave it out")
        tokens = await self._tokens(body, chat)
        room = self._longest - len(tokens)
        if room < 1:
            raise Refused(400, f"the prompt has {len(tokens)} tokens; there is room for {self._longest - 1}")
        count = _get(body, "max_completion_tokens", int, None) or _get(body, "max_tokens", int, None) or room
        if count < 1:
            raise Refused(400, f"`max_tokens` must be at least 1, got {count}")
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[tuple[str, str | None]]()

        def say(piece: str, reason: str | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(pieces.put_nowait, (piece, reason))

        guide = await self._guide(_get(body, "response_format", dict, {}))
        job = Job(tokens, min(count, room), say, _sampling(body), _stops(body), guide)
        answer = _Answer(chat, self._name, job, pieces)
        try:
            self._service.submit(job)
        except Busy:
            raise Refused(503, "too many requests wait already: come again") from None
        if _get(body, "stream", bool, False):
            usage = bool(_get(body, "stream_options", dict, {}).get("include_usage"))
            return StreamingResponse(answer.events(usage=usage), media_type="text/event-stream")
        return JSONResponse(await answer.whole(request))

    async def _guide(self, form: Mapping[str, Any]) -> Guide | None:
        """What keeps the answer to the form that a client asks for: text, JSON, or JSON by a schema."""
        kind = form.get("type", "text")
        if kind == "text":
            return None
        if kind not in ("json_object", "json_schema"):
            raise Refused(400, f"`response_format` has the type {kind!r}; there are text, json_object and json_schema")
        schema = ANY_JSON
        if kind == "json_schema":
            schema = _get(_get(form, "json_schema", dict, {}), "schema", dict, None)
            if schema is None:
                raise Refused(400, "`response_format` needs `json_schema` with a `schema`")
        async with self._readers:
            try:
                return await run_in_threadpool(self._grammars.json, schema)
            except (ValueError, ImportError) as error:
                raise Refused(400, str(error)) from None

    async def _json(self, request: Request) -> Mapping[str, Any]:
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise Refused(415, "the content type must be application/json")
        found = b""
        async for part in request.stream():
            found += part
            if len(found) > self._body:
                raise Refused(413, f"the request has more than {self._body} bytes")
        try:
            body = json.loads(found)
        except (ValueError, RecursionError):
            raise Refused(400, "the request is not JSON") from None
        if not isinstance(body, dict):
            raise Refused(400, "the request must be an object")
        return body

    async def _tokens(self, body: Mapping[str, Any], chat: bool) -> list[int]:
        async with self._readers:
            try:
                return await run_in_threadpool(self._encode, body, chat)
            except ValueError as error:
                raise Refused(400, str(error)) from None

    def _encode(self, body: Mapping[str, Any], chat: bool) -> list[int]:
        if not chat:
            prompt = body.get("prompt")
            if not isinstance(prompt, str):
                raise Refused(400, "`prompt` must be one text")
            tokens = self._tokenizer.encode(prompt)
        else:
            tokens = self._tokenizer.encode(self._tokenizer.chat(_messages(body.get("messages"))))
        if not tokens:
            raise Refused(400, "the prompt is empty")
        return tokens


class _Answer:
    """What the pieces of a job are for a client."""

    def __init__(self, chat: bool, model: str, job: Job, pieces: asyncio.Queue[tuple[str, str | None]]) -> None:
        self._chat, self._job, self._pieces = chat, job, pieces
        kind = "chat.completion" if chat else "text_completion"
        self._head = {"id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}", "object": kind}
        self._head |= {"created": int(time.time()), "model": model}

    def _usage(self) -> dict[str, int]:
        prompt, written = len(self._job.tokens), self._job.made
        return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}

    async def whole(self, request: Request) -> dict[str, Any]:
        parts, reason = [], None
        try:
            while reason is None:
                try:
                    piece, reason = await asyncio.wait_for(self._pieces.get(), 1)
                    parts.append(piece)
                except TimeoutError:
                    if await request.is_disconnected():
                        raise ClientDisconnect from None
        finally:
            self._job.cancel()  # if it is not over
        if reason.startswith("error"):
            raise Refused(500, reason)
        text = "".join(parts)
        content = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        choice = {"index": 0, "finish_reason": reason, "logprobs": None, **content}
        return {**self._head, "choices": [choice], "usage": self._usage()}

    async def events(self, *, usage: bool) -> AsyncIterator[str]:
        kind = {"object": "chat.completion.chunk"} if self._chat else {}
        first, reason = {"role": "assistant", "content": ""}, None
        try:
            if self._chat:
                yield self._event(kind, {"delta": first}, None)
            while reason is None:
                piece, reason = await self._pieces.get()
                if reason is not None and reason.startswith("error"):
                    yield f"data: {json.dumps({'error': {'message': reason}})}\n\n"
                    return
                if piece:
                    yield self._event(kind, {"delta": {"content": piece}} if self._chat else {"text": piece}, None)
            yield self._event(kind, {"delta": {}} if self._chat else {"text": ""}, reason)
            if usage:
                yield f"data: {json.dumps({**self._head, **kind, 'choices': [], 'usage': self._usage()})}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            self._job.cancel()  # the client went away, or it is over

    def _event(self, kind: dict[str, str], content: dict[str, Any], reason: str | None) -> str:
        choice = {"index": 0, "finish_reason": reason, "logprobs": None, **content}
        return f"data: {json.dumps({**self._head, **kind, 'choices': [choice]})}\n\n"


def _get(body: Mapping[str, Any], name: str, kind: type, usual: Any) -> Any:
    """A field of the request; the usual value if it is left out or null."""
    found = body.get(name)
    if found is None:
        return usual
    if kind is float and isinstance(found, int) and not isinstance(found, bool):
        return float(found)
    if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
        raise Refused(400, f"`{name}` must be of the type {kind.__name__}, got {type(found).__name__}")
    return found


def _sampling(body: Mapping[str, Any]) -> Sampling:
    numbers = {
        name: _get(body, name, float, usual) for name, usual in (("temperature", 0.0), ("top_p", 1.0), ("min_p", 0.0))
    }
    repetition = _get(body, "repetition_penalty", float, 1.0)
    try:
        return Sampling(**numbers, top_k=max(0, _get(body, "top_k", int, 0)), repetition=repetition).checked()
    except ValueError as error:
        raise Refused(400, str(error)) from None


def _stops(body: Mapping[str, Any]) -> list[str]:
    stops = body.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or len(stops) > 8 or not all(isinstance(each, str) for each in stops):
        raise Refused(400, "`stop` must be a text, or up to 8 texts")
    return stops


def _messages(given: Any) -> list[dict[str, str]]:
    """Messages whose content is text, or parts that are text."""
    if not isinstance(given, list) or not given:
        raise Refused(400, "`messages` must be a list of messages")
    found = []
    for each in given:
        role, content = (each.get("role"), each.get("content")) if isinstance(each, dict) else (None, None)
        if isinstance(content, list):
            texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
            content = "".join(map(str, texts)) if len(texts) == len(content) else None
        if not isinstance(role, str) or not isinstance(content, str):
            raise Refused(400, "a message needs a `role`, and a `content` of text")
        found.append({"role": role, "content": content})
    return found
