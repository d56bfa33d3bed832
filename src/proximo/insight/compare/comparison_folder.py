"""A comparison's folder: its plan, and the paths of its runs.

plan.json      what is compared, with which machine     configs/NAME.toml   each contender's config
runs/NAME-seed-N/   ordinary run folders                logs/NAME-seed-N.log   the output of their processes
compare.json  compare.md  compare.html                  the reports
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from proximo.config import toml
from proximo.insight.compare.plan import ComparisonPlan, RunJob
from proximo.runs.config_changes import differences, fields_of, not_allowed, refuse_no_field
from proximo.system.folders import write_file
from proximo.system.locks import NAME as LOCK
from proximo.system.machine import Machine
from proximo.system.opening import UnsafeFile, make_folder, read_json, read_text

PLAN, CONFIGS, RUNS, LOGS = "plan.json", "configs", "runs", "logs"
FORMAT = 1


class ComparisonFolder:
    """The folder, and the plan stored at the start of the comparison."""

    def __init__(self, folder: Path, trackers: Sequence[str] = (), allowed: Sequence[str] = ()) -> None:
        """`trackers` are told of each run while it runs; `allowed` are fields that may differ from an earlier
        attempt's."""
        self.folder, self.trackers, self.allowed = folder, trackers, allowed

    def run(self, job: RunJob) -> Path:
        return self.folder / RUNS / job.name

    def log(self, job: RunJob) -> Path:
        return self.folder / LOGS / f"{job.name}.log"

    def config(self, contender: str) -> Path:
        return self.folder / CONFIGS / f"{contender}.toml"

    def check(self, plan: ComparisonPlan) -> None:
        """Raise ValueError if the folder holds anything other than an earlier attempt at this comparison."""
        known = self._known()
        self._refuse_no_field(plan)
        if known is None:
            if self.folder.exists() and any(path.name != LOCK for path in self.folder.iterdir()):
                raise ValueError(f"`run={self.folder}` holds something else than a comparison: choose another name")
            return
        wrong = self._differences(plan, known)
        if wrong:
            raise ValueError(
                f"`run={self.folder}` holds another comparison: {'; '.join(wrong)}. Give its own command, choose "
                "another name, or allow fields to change, `allow_change=['FIELD']`"
            )

    def _refuse_no_field(self, plan: ComparisonPlan) -> None:
        """Raise ValueError for an allowed field that no contender has, nor had."""
        texts = [toml.dumps(contender.config) for contender in plan.contenders]
        for contender in plan.contenders:
            with suppress(OSError, ValueError):  # a file that cannot be read is told of below
                texts.append(read_text(self.config(contender.name)))
        refuse_no_field(self.allowed, {field for text in texts for field in fields_of(text)})

    def settle(
        self, plan: ComparisonPlan, machines: Mapping[str, Machine], command: Sequence[str]
    ) -> dict[str, Machine]:
        """Store the plan; returns the machines by contender that the comparison started with."""
        known = self._known()
        machines = dict(machines)
        if known is not None:
            machines |= {name: Machine.from_dict(machine) for name, machine in known["machines"].items()}
        content = {
            "format": FORMAT,
            "contenders": [contender.name for contender in plan.contenders],
            "seeds": plan.seeds,
            "budget": asdict(plan.budget),
            "machines": {name: machine.to_dict() for name, machine in machines.items()},
            "command": shlex.join(command),
        }
        # The plan first: it identifies the folder if the process dies before all is written.
        make_folder(self.folder)
        write_file(self.folder / PLAN, (json.dumps(content, indent=1) + "\n").encode())
        for folder in (CONFIGS, RUNS, LOGS):
            make_folder(self.folder / folder)
        for contender in plan.contenders:
            write_file(self.config(contender.name), toml.dumps(contender.config).encode())
        return machines

    def _known(self) -> dict[str, Any] | None:
        try:
            known = read_json(self.folder / PLAN)
            if known["format"] == FORMAT and isinstance(known["machines"], dict) and isinstance(known["seeds"], list):
                return known
        except FileNotFoundError:
            return None
        except UnsafeFile:
            raise
        except (OSError, ValueError, KeyError, TypeError):
            pass
        raise ValueError(
            f"`run={self.folder}`: its {PLAN} is damaged or of another version; choose another name or remove it"
        )

    def _differences(self, plan: ComparisonPlan, known: Mapping[str, Any]) -> list[str]:
        names = [contender.name for contender in plan.contenders]
        if known["contenders"] != names:
            return [f"it is of {', '.join(map(str, known['contenders']))}, not of {', '.join(names)}"]
        wrong = []
        for contender in plan.contenders:
            try:
                before = read_text(self.config(contender.name))
                changed = not_allowed(differences(before, toml.dumps(contender.config)), self.allowed)
            except FileNotFoundError:  # not written yet; a started run has its own config
                continue
            except (OSError, ValueError):
                return [f"its {self.config(contender.name).name} cannot be read"]
            wrong += [f"{contender.name}: {field} {what}" for field, what in changed.items()]
        if list(plan.seeds)[: len(known["seeds"])] != known["seeds"]:
            wrong.append(
                f"it has {len(known['seeds'])} seeds, from {known['seeds'][0]} on; more can be added, not fewer"
            )
        return wrong
