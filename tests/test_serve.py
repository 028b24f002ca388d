"""The server of the language model: OpenAI's own client, limits, and many requests with some clients that vanish."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")
uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from eformer.examples.llm.server import LOCAL, Server  # noqa: E402
from eformer.examples.llm.service import Busy, Job, Service  # noqa: E402
from eformer.examples.llm.writer import LanguageModel, load  # noqa: E402
from model.browser import chromium, find_chromium  # noqa: E402
from small_llm import write_gguf  # noqa: E402

ROWS, LONGEST, QUEUE, BODY, KEY = 4, 120, 250, 20_000, "a key"


class Served(NamedTuple):
    url: str
    model: LanguageModel  # for one text at a time: what each answer must be
    service: Service

    def client(self, key: str = KEY) -> Any:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def post(self, path: str, **options: Any) -> Any:
        headers = {"Authorization": f"Bearer {KEY}", **options.pop("headers", {})}
        return httpx.post(f"{self.url}/v1/{path}", headers=headers, timeout=60, **options)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = write_gguf(tmp_path_factory.mktemp("model") / "m.gguf", "llama", layers=1)
    jax.config.update("jax_numpy_rank_promotion", "allow")  # in all threads
    model = load(path, longest=LONGEST, rows=ROWS)
    service = Service(model.engine, model.tokenizer, most=QUEUE)
    app = Server(service, model.tokenizer, "m", longest=LONGEST, body=BODY, key=KEY).application(LOCAL)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield Served(f"http://127.0.0.1:{port}", load(path, longest=LONGEST), service)
    server.should_exit = True
    thread.join(30)
    jax.config.update("jax_numpy_rank_promotion", "raise")
    assert not thread.is_alive()
    with pytest.raises(Busy):  # the service ended with the server
        service.submit(Job([1], 1, print))


MESSAGES = [{"role": "user", "content": "he the"}]


def test_openais_client_gets_answers_whole_and_as_streams(served: Served):
    client = served.client()
    assert [model.id for model in client.models.list()] == ["m"]
    expected = served.model.generate(MESSAGES, count=9)
    whole = client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=9, temperature=0)
    assert whole.choices[0].message.content == expected
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("length", 9)
    stream = client.chat.completions.create(
        model="m", messages=MESSAGES, max_tokens=9, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    assert chunks[-1].usage == whole.usage
    text = served.model.generate("he the", count=12)
    stop = text[4:6]
    plain = client.completions.create(model="m", prompt="he the", max_tokens=12, stop=stop)
    assert (plain.choices[0].text, plain.choices[0].finish_reason) == (text[: text.index(stop)], "stop")
    pieces = client.completions.create(model="m", prompt="he the", max_tokens=12, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == text


def test_an_answer_is_json_by_a_schema(served: Served):
    """One beside another that has no schema: each is what it would be alone."""
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"enum": ["he", "the"]}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    client, found = served.client(), {}

    def plain() -> None:
        found["plain"] = client.completions.create(model="m", prompt="he the", max_tokens=12).choices[0].text

    other = threading.Thread(target=plain)
    other.start()
    options = {"model": "m", "messages": MESSAGES, "response_format": form, "max_tokens": 60, "temperature": 1.0}
    answer = client.chat.completions.create(**options)
    other.join(60)
    assert json.loads(answer.choices[0].message.content) in ({"a": "he"}, {"a": "the"})
    assert answer.choices[0].finish_reason == "stop"
    assert found["plain"] == served.model.generate("he the", count=12)
    assert json.loads(served.model.generate("he", count=60, schema=schema))["a"] in ("he", "the")


REFUSED = {
    "no key": (401, {"headers": {"Authorization": "none"}, "json": {"prompt": "a"}}),
    "no JSON": (400, {"content": "{", "headers": {"Content-Type": "application/json"}}),
    "no type, as of a stranger's page": (415, {"content": '{"prompt": "a"}'}),
    "a long body": (413, {"json": {"prompt": "a" * BODY}}),
    "a long prompt": (400, {"json": {"prompt": "a" * (LONGEST + 1)}}),
    "an empty prompt": (400, {"json": {"prompt": ""}}),
    "no prompt": (400, {"json": {}}),
    "several answers": (400, {"json": {"prompt": "a", "n": 2}}),
    "a temperature below 0": (400, {"json": {"prompt": "a", "temperature": -1}}),
    "a count that is text": (400, {"json": {"prompt": "a", "max_tokens": "9"}}),
    "another form of answers": (400, {"json": {"prompt": "a", "response_format": {"type": "xml"}}}),
    "a schema that is none": (
        400,
        {"json": {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 3}}}}},
    ),
    "another name of the host": (400, {"json": {"prompt": "a"}, "headers": {"Host": "stranger.example"}}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str, served: Served):
    status, request = REFUSED[case]
    answer = served.post("completions", **request)
    assert answer.status_code == status, answer.text
    if "host" not in case:
        assert len(answer.json()["error"]["message"]) > 10


@pytest.mark.parametrize(
    "messages", [None, [], ["a"], [{"role": "user"}], [{"role": "user", "content": [{"type": "a"}]}]]
)
def test_messages_that_are_none(messages: object, served: Served):
    answer = served.post("chat/completions", json={"messages": messages})
    assert (answer.status_code, "error" in answer.json()) == (400, True)


def test_200_requests_of_which_some_are_slow_and_some_vanish(served: Served):
    """Each gets what it would get alone; nothing is left behind."""
    prompts = ["he the " * (1 + i % 5) + "x" * (i % 3) for i in range(200)]
    counts = [4 + i % 9 for i in range(200)]
    cases = sorted({(prompt, count) for prompt, count in zip(prompts, counts, strict=True)})
    expected = {case: served.model.generate(case[0], count=case[1]) for case in cases}
    headers = {"Authorization": f"Bearer {KEY}"}

    async def ask(client: Any, i: int) -> str | None:
        body = {"prompt": prompts[i], "max_tokens": counts[i], "stream": i % 4 < 2}
        if not body["stream"]:
            return (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]
        found = ""
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if i % 20 == 4:
                    return None  # it goes away
                if line.startswith("data: {"):
                    found += json.loads(line[6:])["choices"][0]["text"]
                    await asyncio.sleep(0.02 * (i % 20 == 5))  # it reads slowly
        return found

    async def all_of_them() -> list[str | None]:
        async with httpx.AsyncClient(
            base_url=served.url, headers=headers, timeout=120, limits=httpx.Limits(max_connections=200)
        ) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(200)))

    found = asyncio.run(all_of_them())
    assert [i for i, text in enumerate(found) if text is None] == list(range(4, 200, 20))
    wrong = [i for i, text in enumerate(found) if text not in (None, expected[prompts[i], counts[i]])]
    assert not wrong
    with contextlib.suppress(TimeoutError):
        _until(lambda: not served.service._written and not served.service._waiting)
    assert (served.service._written, list(served.service._waiting)) == ({}, [])


def _until(holds: Any, seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.01)


def test_a_queue_that_is_full_says_come_again(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(served.service, "_most", 0)
    answer = served.post("completions", json={"prompt": "a"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


def test_the_page_is_there(served: Served):
    page = httpx.get(served.url)
    assert page.status_code == 200
    assert "/v1/chat/completions" in page.text
    assert "http" not in page.text.replace("http-equiv", "")  # nothing of other servers


def test_a_browser_talks_on_the_page(served: Served, tmp_path: Path):
    """It asks this server alone, shows what the model answers, and begins again."""
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium is installed to look at the page with")
    with chromium(program, tmp_path) as page:
        page.call("Page.navigate", url=f"{served.url}/#key={KEY.replace(' ', '%20')}")
        _until(lambda: page.value("document.getElementById('model')?.textContent") == "m")
        page.value("document.getElementById('text').value = 'he the'; document.getElementById('send').click()")
        _until(lambda: page.value("document.querySelectorAll('.note').length") == 1, 60)
        expected = served.model.generate(MESSAGES)
        assert page.value("document.querySelector('.assistant').textContent") == expected
        assert "tokens in" in page.value("document.querySelector('.note').textContent")
        page.value("document.getElementById('reset').click()")
        assert page.value("document.getElementById('talk').childElementCount") == 0
        assert page.problems == []
        assert all(request.startswith(served.url) for request in page.requests), page.requests


def test_the_command_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any):
    from eformer import cli

    monkeypatch.setitem(__import__("sys").modules, "uvicorn", None)
    assert cli.main(["serve", str(tmp_path / "none.gguf")]) == 1
    assert "pip install starlette uvicorn" in capsys.readouterr().err
