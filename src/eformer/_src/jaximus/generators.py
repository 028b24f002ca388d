"""Generators and coroutines: a function that stops and goes on runs under `implicit` in each of its steps.

Between two steps the trace of `implicit` is not there, so whoever takes the values sees those of the dense function.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from contextlib import AbstractContextManager
from typing import Any

from .types import Node

Running = Callable[[], AbstractContextManager[object]]  # around a step
Convert = Callable[[Node], Node]  # of what goes into a step, or comes out of it


def in_steps(out: Node, running: Running, enter: Convert, leave: Convert, finish: Callable[[], None]) -> Node:
    """`out`, if it is a generator or a coroutine, running in steps, with `finish` at its end; else None."""
    if inspect.isgenerator(out):
        return _generator(out, running, enter, leave, finish)
    if inspect.iscoroutine(out):
        return _coroutine(out, running, leave, finish)
    if inspect.isasyncgen(out):
        return _async_generator(out, running, enter, leave, finish)
    return None


def _steps(of: Any, running: Running, enter: Convert, leave: Convert) -> Generator[Node, Node, Node]:
    """Each step inside `running`; what is sent or thrown from outside goes in, and what is yielded comes out."""
    step: Callable[[], Node] = lambda: of.send(None)  # noqa: E731
    try:
        while True:
            try:
                with running():
                    value = step()
            except StopIteration as stop:
                return leave(stop.value)
            try:
                sent = yield leave(value)
            except GeneratorExit:
                raise
            except BaseException as error:  # noqa: BLE001  (it belongs to the function)
                step = lambda error=error: of.throw(error)  # noqa: E731
            else:
                step = lambda sent=sent: of.send(enter(sent))  # noqa: E731
    finally:
        with running():
            of.close()


def _generator(
    out: Generator[Node, Node, Node], running: Running, enter: Convert, leave: Convert, finish: Callable[[], None]
) -> Generator[Node, Node, Node]:
    try:
        return (yield from _steps(out, running, enter, leave))
    finally:
        finish()


class _Awaited:
    """What `await` runs in steps; the values that go to and from the event loop are its own."""

    def __init__(self, of: Any, running: Running) -> None:
        self.of, self.running = of, running

    def __await__(self) -> Generator[Any, Any, Any]:
        return _steps(self.of, self.running, _same, _same)


def _same(value: Node) -> Node:
    return value


async def _coroutine(
    out: Coroutine[Any, Any, Node], running: Running, leave: Convert, finish: Callable[[], None]
) -> Node:
    try:
        return leave(await _Awaited(out, running))
    finally:
        finish()


async def _async_generator(
    out: AsyncGenerator[Node, Node], running: Running, enter: Convert, leave: Convert, finish: Callable[[], None]
) -> AsyncGenerator[Node, Node]:
    step: Callable[[], Awaitable[Node]] = lambda: out.asend(None)  # noqa: E731
    try:
        while True:
            try:
                value = await _Awaited(step(), running)
            except StopAsyncIteration:
                return
            try:
                sent = yield leave(value)
            except GeneratorExit:
                raise
            except BaseException as error:  # noqa: BLE001  (it belongs to the function)
                step = lambda error=error: out.athrow(error)  # noqa: E731
            else:
                step = lambda sent=sent: out.asend(enter(sent))  # noqa: E731
    finally:
        await _Awaited(out.aclose(), running)
        finish()
