"""Configs of runs from files, of this version or an earlier one."""

from proximo.config import toml
from proximo.config.aliases import renewed
from proximo.config.trust.permission import ANYTHING, Code
from proximo.rl.config import RunConfig


def load_run(path: str, code: Code | None = None) -> RunConfig:
    """A run's config from a file, of this version or an earlier one."""
    return toml.load(path, RunConfig, code, renewed)


def loads_run(text: str, source: str = "config", code: Code = ANYTHING) -> RunConfig:
    """A run's config from TOML, of this version or an earlier one; `source` names the text in errors."""
    return toml.loads(text, RunConfig, source, finite=True, code=code, renew=renewed)
