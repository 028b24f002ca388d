"""`eformer serve`: a language model with the interface of OpenAI."""

from __future__ import annotations

import argparse
import importlib
import os
import socket
import sys
from pathlib import Path
from typing import Any

from eformer._src.cli.answer import Answer
from eformer._src.cli.arguments import positive
from eformer._src.cli.interrupt import answered_by

from . import language_model

EXAMPLE = (
    """\
examples:
  eformer serve smollm2
  eformer serve ./folder --format int4 --rows 8 --port 9000
  EFORMER_KEY=secret eformer serve model.gguf --host 0.0.0.0

  from openai import OpenAI
  client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
  client.chat.completions.create(model="", messages=[{"role": "user", "content": "Hello"}])

Paths are /v1/chat/completions, /v1/completions and /v1/models, and / is a page to chat on. Only this machine can
call unless --host says otherwise; then give a key. It needs `pip install starlette uvicorn`. Ctrl-C ends it, after the
answers that are being written or 10 seconds.
"""
    + language_model.MODELS
)
PATIENCE = 10  # seconds that answers have when the server ends
IDLE = 30  # seconds that a client may be silent between two requests


def configure(parser: argparse.ArgumentParser) -> None:
    language_model.configure(parser)
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="the address to listen on (127.0.0.1)")
    add("--port", type=int, default=8000, help="0 takes a free one (8000)")
    add("--key", default=os.environ.get("EFORMER_KEY"), help="what clients must send (the variable EFORMER_KEY)")
    add("--rows", type=positive, default=4, metavar="N", help="texts that are written at once (4)")
    add("--queue", type=positive, default=256, metavar="N", help="requests that may wait; others get 503 (256)")
    add("--max-body", type=positive, default=1 << 20, metavar="BYTES", help="of a request (1048576)")


def run(args: argparse.Namespace) -> Answer:
    uvicorn, server, service = _parts()
    is_local = args.host in ("127.0.0.1", "localhost", "::1")
    with socket.create_server(
        (args.host, args.port), family=socket.AF_INET6 if ":" in args.host else socket.AF_INET
    ) as own:
        model = language_model.load(args, rows=args.rows)
        worker = service.Service(model.engine, model.tokenizer, most=args.queue)
        limits: dict[str, Any] = {"longest": model.engine.longest, "body": args.max_body, "key": args.key}
        app = server.Server(worker, model.tokenizer, Path(args.model).name, **limits).application(
            server.LOCAL if is_local else None
        )
        where = f"http://{args.host}:{own.getsockname()[1]}"
        print(
            f"serving {args.model} on {where}/v1, and a page on {where}/; Ctrl-C ends it", file=sys.stderr, flush=True
        )
        if not is_local and not args.key:
            print("without --key, everybody who can reach this machine may use it", file=sys.stderr, flush=True)
        config = uvicorn.Config(
            app, log_level="warning", timeout_graceful_shutdown=PATIENCE, timeout_keep_alive=IDLE, access_log=False
        )
        with answered_by():  # uvicorn handles Ctrl-C
            uvicorn.Server(config).run(sockets=[own])
        worker.close()
    return Answer([], {"served": args.model})


def _parts() -> tuple[Any, Any, Any]:
    try:
        uvicorn = importlib.import_module("uvicorn")
        server = importlib.import_module(f"{language_model.EXAMPLE}.server")
    except ImportError as error:
        raise ImportError(f"a server needs the package {error.name}: pip install starlette uvicorn") from None
    return uvicorn, server, importlib.import_module(f"{language_model.EXAMPLE}.service")
