"""An environment of three replies that misbehaves at its third as a file says; without that file it behaves."""

import json
import os
import random
import time
from pathlib import Path
from typing import Any

from proximo.environments import Done, Environment, Observation

MARKS = "<eos><pad><unk> {% for %}{{ 7 * 7 }}<|im_end|><tool_call>"


class Hostile(Environment):
    def reset(self, problem: dict[str, Any]) -> str | None:
        options = Path(os.environ.get("HOSTILE_ENVIRONMENT", ""))
        self.deed = json.loads(options.read_text())["deed"] if options.is_file() else ""
        self.replies = 0
        self.draw = random.random()  # the same in all siblings
        if self.deed == "starts differently in each sibling" and os.getpid() % 2:
            return f"start {os.getpid()}"
        return None

    def step(self, reply: str) -> Any:
        self.replies += 1
        if self.replies == 3:
            if random.random() < 0.3:
                self._do()
            return Done(float(self.draw > 0.5) + len(reply) / 10)
        return Observation(f" {self._reply()} ", 0.1)

    def _reply(self) -> str:
        if self.deed == "answers a megabyte":
            return "x" * 2**20
        return MARKS if self.deed == "answers with special tokens and marks of templates" else str(self.replies)

    def _do(self) -> None:
        match self.deed:
            case "hangs at turn 3":
                time.sleep(1000)
            case "raises at turn 3":
                raise KeyError("turn 3")
            case "leaks memory":
                self.kept = [bytearray(2**24) for _ in range(1000)]
            case "ends its process":
                os._exit(7)
            case "prints 50 megabytes":
                print("x" * (50 * 2**20), flush=True)
            case "leaves a process behind":
                if not os.fork():
                    time.sleep(1000)
                    os._exit(0)
