"""A class that tests load by its path, as a user's own."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Triangle:
    name: str = "triangle"
    height: float = 1.0
    corners: tuple[int, ...] = ()
    sides = 3

    def area(self, unit: float) -> float:
        return unit * self.height / 2

    def __call__(self) -> str:
        return self.name
