"""The file of a course, next to the config of its runs."""

from dataclasses import dataclass
from pathlib import Path

from proximo import toml
from proximo.studies.courses.forked import Forked
from proximo.studies.courses.halved import Halved
from proximo.studies.courses.preferred import Preferred

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
