"""The colours of the series can be told apart, however somebody sees colours."""

import math
import re
from itertools import combinations

import pytest

from tests import ROOT

STYLE = (ROOT / "src/proximo/insight/charts/style.css").read_text()
LEAST, CONTRAST = 10.0, 3.0
VISION = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
"""Machado, Oliveira and Fernandes (2009), severity 1, on linear sRGB."""
XYZ = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750), (0.0193339, 0.1191920, 0.9503041))
Three = tuple[float, float, float]


def times(matrix, vector) -> Three:
    a, b, c = (sum(weight * value for weight, value in zip(row, vector, strict=True)) for row in matrix)
    return a, b, c


def linear(colour: str) -> Three:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return red, green, blue


def lab(rgb: Three) -> Three:
    white = times(XYZ, (1, 1, 1))
    shares = [value / full for value, full in zip(times(XYZ, rgb), white, strict=True)]
    x, y, z = (each ** (1 / 3) if each > (6 / 29) ** 3 else each / (3 * (6 / 29) ** 2) + 4 / 29 for each in shares)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def difference(one: Three, other: Three) -> float:
    """CIEDE2000, after Sharma, Wu and Dalal (2005)."""
    (l1, a1, b1), (l2, a2, b2) = one, other
    chroma = ((math.hypot(a1, b1) + math.hypot(a2, b2)) / 2) ** 7
    stretch = 1.5 - 0.5 * math.sqrt(chroma / (chroma + 25**7))
    c1, c2 = math.hypot(stretch * a1, b1), math.hypot(stretch * a2, b2)
    h1, h2 = (math.degrees(math.atan2(b, stretch * a)) % 360 for a, b in ((a1, b1), (a2, b2)))
    turn = (h2 - h1 + 180) % 360 - 180 if c1 * c2 else 0.0
    hue = 2 * math.sqrt(c1 * c2) * math.sin(math.radians(turn) / 2)
    light, saturated = (l1 + l2) / 2, (c1 + c2) / 2
    angle = (h1 + h2) / 2 if abs(h1 - h2) <= 180 else (h1 + h2 + 360) / 2 % 360
    angle = angle if c1 * c2 else h1 + h2
    waves = ((-0.17, 1, -30), (0.24, 2, 0), (0.32, 3, 6), (-0.2, 4, -63))
    weight = 1 + sum(size * math.cos(math.radians(number * angle + shift)) for size, number, shift in waves)
    s_l = 1 + 0.015 * (light - 50) ** 2 / math.sqrt(20 + (light - 50) ** 2)
    parts = (l2 - l1) / s_l, (c2 - c1) / (1 + 0.045 * saturated), hue / (1 + 0.015 * saturated * weight)
    blue = math.radians(60 * math.exp(-(((angle - 275) / 25) ** 2)))
    rotation = -2 * math.sqrt(saturated**7 / (saturated**7 + 25**7)) * math.sin(blue)
    return math.sqrt(sum(part**2 for part in parts) + rotation * parts[1] * parts[2])


def seen(colour: str, vision: str) -> Three:
    red, green, blue = (min(max(part, 0.0), 1.0) for part in times(VISION[vision], linear(colour)))
    return lab((red, green, blue))


def contrast(one: str, other: str) -> float:
    dark, bright = sorted(times(XYZ, linear(colour))[1] for colour in (one, other))
    return (bright + 0.05) / (dark + 0.05)


def test_the_difference_is_that_of_the_published_pairs():
    pairs = [
        ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425),
        ((50, 2.5, 0), (50, 0, -2.5), 4.3065),
        ((50, 2.49, -0.001), (50, -2.49, 0.0011), 7.2195),
        ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
        ((90.8027, -2.0831, 1.4410), (91.1528, -1.6435, 0.0447), 1.4441),
    ]
    assert [round(difference(one, other), 4) for one, other, _ in pairs] == [expected for *_, expected in pairs]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_any_two_colours_of_a_theme_differ_for_everyone(theme):
    light, dark = STYLE.split("@media (prefers-color-scheme: dark)")[:2]
    found = dict(re.findall(r"--(\w+): (#\w{6});", light if theme == "light" else dark[: dark.index("\n}\n")]))
    series = [found[f"s{number}"] for number in range(1, 9)]
    assert "s9" not in found
    for colour in series:
        assert contrast(colour, found["paper"]) >= CONTRAST, colour
    for vision in VISION:
        for one, other in combinations(series, 2):
            assert difference(seen(one, vision), seen(other, vision)) >= LEAST, (vision, one, other)
