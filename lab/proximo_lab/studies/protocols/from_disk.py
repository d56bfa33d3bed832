"""The file of a course, next to the config of its runs."""

from dataclasses import dataclass
from pathlib import Path

from proximo.config import toml
from proximo_lab.studies.protocols.dpo import Preferred
from proximo_lab.studies.protocols.gradient_noise import Halved
from proximo_lab.studies.protocols.recovery_forks import Forked

Courses = Forked | Halved | Preferred


@dataclass(frozen=True)
class Stored:
    course: Courses


def course_file(config: Path) -> Path:
    return config.with_suffix(".course.toml")


def read_course(config: Path) -> Courses | None:
    """The course of the runs with a config; None if they are plain training."""
    path = course_file(config)
    return toml.load(str(path), Stored).course if path.exists() else None
