"""`proximo serve`: an OpenAI-compatible endpoint for one model, with a page to chat with it."""

import json
import os
import secrets
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from proximo.cli.arguments import refuse, take_model
from proximo.cli.flags import changed
from proximo.models import Precision
from proximo.system.safe_text import visible

if TYPE_CHECKING:
    from proximo.serving.requests import Asking

TOKEN = "PROXIMO_TOKEN"
"""Environment variable with the token that clients must send."""
HELP = """arguments of the command itself:
  MODEL   folder, run folder, checkpoint, hub id or model name
endpoints: /v1/models, /v1/chat/completions, /v1/completions; the chat page is at /
On the loopback address no token is needed. On another one a token is required and printed; the environment variable
PROXIMO_TOKEN chooses it, and then it is required on the loopback address too. Clients send it as their API key.
Ctrl-C stops the server.
examples:
  proximo serve runs/a
  proximo serve runs/a --name helper
  proximo serve tiny-arithmetic --port 8000 --max-tokens 64
"""


@dataclass(frozen=True)
class ServeOptions:
    """Address and options with which a model is served."""

    name: str | None = None
    """Name of the model for clients. None: that of its folder, or its hub id."""
    host: str = "127.0.0.1"
    """Address to listen on. 127.0.0.1: this machine only; 0.0.0.0: all networks, with a token."""
    port: int = 8000
    """Port to listen on. 0: any free one."""
    slots: int = 128
    """Completions that are decoded at once, at most."""
    max_tokens: int = 1024
    """Length limit of a chat message whose request names none."""
    device: str = "auto"
    """Torch device of the model. `auto`: a GPU if there is one, else the CPU."""
    dtype: Precision = "auto"
    """Data type of the weights. `auto`: bfloat16 on a GPU, float32 on a CPU."""

    def __post_init__(self) -> None:
        if self.name is not None and not self.name.strip():
            raise ValueError(f"name is {self.name!r}: give a name for clients to ask for, or leave it out")
        if not 0 <= self.port < 65536:
            raise ValueError(f"port is {self.port}: give a number from 0 to 65535; 0 takes a free one")
        for name in ("slots", "max_tokens"):
            if vars(self)[name] < 1:
                raise ValueError(f"{name} is {vars(self)[name]}: give at least 1")


def run(arguments: list[str]) -> int:
    """Serve until Ctrl-C; exit status 0."""
    name = take_model(arguments, "proximo serve")
    options = changed(
        ServeOptions(),
        arguments,
        prog="proximo serve",
        usage="MODEL",
        description="Serve a model as an OpenAI-compatible endpoint, with a page to chat with it.",
        help_more=HELP,
    )
    try:
        from proximo.insight.page.connections import allow_connections
        from proximo.serving.server import application, bind, is_loopback, server
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn"):
            raise
        refuse('serving needs a small web server: pip install "proximo[view]"')
    allow_connections()
    try:
        socket = bind(options.host, options.port)
    except OSError as error:
        refuse(f"--host {options.host} --port {options.port}: {error.strerror}; give another address or port")
    token = os.environ.get(TOKEN) or (None if is_loopback(socket) else secrets.token_urlsafe(24))

    from transformers.utils.logging import disable_progress_bar

    from proximo.cli.models import open_model
    from proximo.serving.engine import ServingEngine
    from proximo.serving.reading import RequestReader
    from proximo.serving.requests import Asking

    disable_progress_bar()
    model, tokenizer = open_model(name, options.device, options.dtype)
    model.requires_grad_(False)  # the sampler may take the memory that training would
    engine, port = ServingEngine(model, tokenizer, slots=options.slots), socket.getsockname()[1]
    reader = RequestReader(Asking(tokenizer, engine.context, options.name or served_name(name), options.max_tokens))
    reader.start()
    app = application(engine, reader, port=port, token=token)
    where = f"http://{f'[{options.host}]' if ':' in options.host else options.host}:{port}"
    print("\n".join(first_lines(where, token, reader.asking)), flush=True)
    try:
        server(app).run(sockets=[socket])
    except KeyboardInterrupt:  # the normal way to stop it
        print(file=sys.stderr)
    finally:
        reader.close()
        engine.close()
    return 0


def served_name(model: str) -> str:
    """Name for clients of a model that was given none: a hub id, or what its folder or its run is called."""
    if not Path(model).exists():
        return model
    folder = Path(model).resolve()
    if folder.parent.match("checkpoints"):
        return f"{folder.parents[1].name}-{folder.name}"
    return folder.name or "model"


def first_lines(where: str, token: str | None, asking: "Asking") -> list[str]:
    """Lines with the server's address, and a command that asks it."""
    if asking.tokenizer.chat_template is None:
        path, asked = "completions", {"prompt": "Hello"}
    else:
        path, asked = "chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}
    body = json.dumps({"model": asking.model, **asked, "max_tokens": min(64, asking.max_tokens)})
    key = [] if token is None else ["-H", f"Authorization: Bearer {token}"]
    command = ["curl", f"{where}/v1/{path}", *key, "-H", "Content-Type: application/json", "-d", body]
    return [
        f"chat page  {where}/{'' if token is None else f'#token={token}'}",
        f"endpoint   {where}/v1   model {visible(asking.model)!r}, API key {'any' if token is None else token}",
        f"try it     {shlex.join(command)}",
        "Ctrl-C stops it",
    ]
