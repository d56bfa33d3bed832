"""`proximo serve`: an OpenAI-compatible endpoint for one model, with a page to chat with it."""

import os
import secrets
import sys
from dataclasses import dataclass

from proximo.cli.flags import changed, refuse, take_model
from proximo.models import Precision

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
  proximo serve tiny-arithmetic --port 8000 --max-tokens 64
"""


@dataclass(frozen=True)
class ServeOptions:
    """Where and how a model is served."""

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
        from proximo.serving.server import application, bind, is_loopback, server
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn"):
            raise
        refuse('serving needs a small web server: pip install "proximo[view]"')
    try:
        socket = bind(options.host, options.port)
    except OSError as error:
        refuse(f"--host {options.host} --port {options.port}: {error.strerror}; give another address or port")
    token = os.environ.get(TOKEN) or (None if is_loopback(socket) else secrets.token_urlsafe(24))

    from transformers.utils.logging import disable_progress_bar

    from proximo.cli.models import open_model
    from proximo.serving.engine import Engine

    disable_progress_bar()
    model, tokenizer = open_model(name, options.device, options.dtype)
    model.requires_grad_(False)  # the sampler may take the memory that training would
    engine, port = Engine(model, tokenizer, slots=options.slots), socket.getsockname()[1]
    app = application(engine, model=name, port=port, token=token, max_tokens=options.max_tokens)
    where = f"http://{f'[{options.host}]' if ':' in options.host else options.host}:{port}"
    print(f"chat page  {where}/{'' if token is None else f'#token={token}'}")
    print(f"endpoint   {where}/v1   model {name!r}, API key {'any' if token is None else token}")
    print("Ctrl-C stops it", flush=True)
    try:
        server(app).run(sockets=[socket])
    except KeyboardInterrupt:  # the normal way to stop it
        print(file=sys.stderr)
    finally:
        engine.close()
    return 0
