"""A value written as TOML loads back equal, and a bad text says everything that is wrong with it."""

import dataclasses
import tomllib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from proximo import algorithms
from proximo.algorithms import DAPO, GRPO, PPO, VAPO, Algorithm, UnusualChoice
from proximo.config import toml
from proximo.losses import Clip, Gae, SoftOverlong, TokenWhitened, ValueLoss

NAMED = [value for value in vars(algorithms).values() if isinstance(value, Algorithm)]


@dataclass(frozen=True)
class Dog:
    name: str = "Rex"
    weight: float = 20.5


@dataclass(frozen=True)
class Cat:
    lives: int = 9
    friend: "Dog | Cat | None" = None

    def __post_init__(self) -> None:
        if self.lives < 1:
            raise ValueError(f"cat.lives is {self.lives}: give at least 1")


@dataclass(frozen=True)
class House:
    street: str
    owner: Dog
    pet: Dog | Cat = field(default_factory=Dog)
    pets: tuple[Dog | Cat, ...] = ()
    guest: Cat | None = field(default_factory=Cat)
    one_or_many: Dog | Cat | tuple[Dog | Cat, ...] | None = None
    colour: Literal["red", "blue", 3] = "red"
    floors: int = 2
    rent: float | None = 1.5
    deposit: float | None = None
    garden: bool = False
    betas: tuple[float, float] = (0.9, 0.95)
    names: tuple[str, ...] = ("a", "b")
    extras: dict[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, float] = field(default_factory=dict)


def problems_of(text: str, kind: type = House) -> list[str]:
    with pytest.raises(toml.ConfigError) as caught:
        toml.loads(text, kind, "house.toml")
    assert str(caught.value) == "\n".join(caught.value.problems)
    return caught.value.problems


# Writing, by hand.


def test_a_table_per_piece_and_a_type_only_where_there_is_a_choice():
    value = House("Elm", owner=Dog("Ada", 3), pet=Cat(7), pets=(Dog(), Cat(friend=Cat(1))), guest=None, rent=None)
    assert toml.dumps(value) == (
        'street = "Elm"\nguest = "none"\ncolour = "red"\nfloors = 2\nrent = "none"\ngarden = false\n'
        'betas = [0.9, 0.95]\nnames = ["a", "b"]\n\n'
        '[owner]\nname = "Ada"\nweight = 3.0\n\n'
        '[pet]\ntype = "Cat"\nlives = 7\n\n'
        '[[pets]]\ntype = "Dog"\nname = "Rex"\nweight = 20.5\n\n'
        '[[pets]]\ntype = "Cat"\nlives = 9\n\n'
        '[pets.friend]\ntype = "Cat"\nlives = 1\n\n'
        "[extras]\n\n[sizes]\n"
    )


def test_what_is_left_out_takes_its_default():
    assert toml.loads('street = "Elm"\nowner = {}', House) == House("Elm", Dog())
    assert toml.loads("", Algorithm) == Algorithm()


def test_one_or_many_keeps_the_difference():
    for held in (None, (), Dog(), (Dog(),), (Dog(), Cat())):
        house = House("Elm", Dog(), one_or_many=held)
        assert toml.loads(toml.dumps(house), House).one_or_many == held


def test_an_integer_serves_as_a_float_and_becomes_one():
    house = toml.loads('street = "Elm"\nowner = {weight = 3}\nrent = 2\nsizes = {hall = 4}', House)
    assert type(house.owner.weight) is float
    assert type(house.rent) is float
    assert type(house.sizes["hall"]) is float


def test_every_character_survives():
    every = "".join(map(chr, range(256))) + "\"'\\ \u2028 é 漢 🦜"
    house = House(every, Dog(every), extras={every: every, "": ""})
    assert toml.loads(toml.dumps(house), House) == house


@pytest.mark.parametrize(
    ("name", "value"), [("rent", "none"), ("extras", {"a": (1,)}), ("extras", {"a": None}), ("pet", 3)]
)
def test_a_value_that_would_not_load_back_is_refused(name: str, value: Any):
    with pytest.raises(ValueError, match=f"^{name}"):
        toml.dumps(replace(House("Elm", Dog()), **{name: value}))


# Reading what is wrong, by hand.


def test_all_problems_at_once_with_path_line_value_and_remedy():
    text = """floors = 2.5
colour = "green"
garden = 1
flors = 3

[owner]
nam = "Ada"
weight = true

[pet]
type = "cat"

[[pets]]
type = "Cat"

[[pets]]
type = "Cat"
lives = 0

[pets.friend]
type = "Dog"
weight = "heavy"

[guest]
friend = {lives = 3}

[sizes]
hall = "wide"
"""
    assert problems_of(text) == [
        "house.toml: street is missing: give a string",
        "house.toml:1: floors is 2.5: give an integer",
        'house.toml:2: colour is "green": give "red" or "blue" or 3',
        "house.toml:3: garden is 1: give true or false",
        "house.toml:4: flors = 3 is unknown, perhaps floors; House knows street, owner, pet, pets, guest, one_or_many, "
        "colour, floors, rent, deposit, garden, betas, names, extras, sizes",
        'house.toml:7: owner.nam = "Ada" is unknown, perhaps name; Dog knows name, weight',
        "house.toml:8: owner.weight is true: give a number",
        'house.toml:11: pet.type is "cat": give one of Dog, Cat, perhaps Cat',
        'house.toml:22: pets[1].friend.weight is "heavy": give a number',
        "house.toml:25: guest.friend.type is missing: give one of Dog, Cat",
        'house.toml:28: sizes.hall is "wide": give a number',
    ]


def test_what_a_class_refuses_is_reported_with_its_place():
    text = 'street = "Elm"\n[owner]\n[[pets]]\ntype = "Dog"\n[[pets]]\ntype = "Cat"\nlives = 0\n[guest]\nlives = -1'
    assert problems_of(text) == [
        "house.toml:5: pets[1]: cat.lives is 0: give at least 1",
        "house.toml:8: guest: cat.lives is -1: give at least 1",
    ]
    assert problems_of("lives = 0", Cat) == ["house.toml: Cat: cat.lives is 0: give at least 1"]


def test_wrong_kinds_of_container():
    text = 'street = "Elm"\nowner = "Ada"\npet = []\npets = 3\nbetas = [0.9]\nnames = ["a", 1]\n'
    text += "extras = {when = 2026-01-02}"
    assert problems_of(text) == [
        'house.toml:2: owner is "Ada": give a table',
        "house.toml:3: pet is []: give a table with a type (Dog, Cat)",
        "house.toml:4: pets is 3: give an array (a table with a type (Dog, Cat) each)",
        "house.toml:5: betas is [0.9]: give an array of 2",
        "house.toml:6: names[1] is 1: give a string",
        "house.toml:7: extras.when is 2026-01-02: give a string or a number",
    ]


def test_odd_keys_do_not_derail_the_search_for_a_line():
    text = 'street = "Elm"\n[owner]\n"a[.b" = 1\n[sizes]\n"x[" = true'
    assert [problem.split(":")[1] for problem in problems_of(text)] == ["3", "5"]


def test_broken_toml_says_where():
    assert problems_of("street = ") == ["house.toml: this is not TOML: Invalid value (at end of document)"]


def test_true_is_no_literal_one():
    @dataclass(frozen=True)
    class Choice:
        level: Literal[0, 1] = 0

    assert problems_of("level = true", Choice) == ["house.toml:1: level is true: give 0 or 1"]


def test_an_algorithms_contradiction_is_an_error_and_an_unusual_choice_a_warning():
    assert problems_of('[ratio]\ntype = "NoRatio"', Algorithm)[0].startswith("house.toml: Algorithm: gate Clip(")
    with pytest.warns(UnusualChoice, match="tau_neg below tau_pos"):
        toml.loads('[gate]\ntype = "SoftGate"\ntau_pos = 2.0\ntau_neg = 1.0', Algorithm)


# Laws.


@pytest.mark.parametrize("algorithm", NAMED)
def test_every_named_algorithm_loads_back_equal(algorithm: Algorithm):
    assert len(NAMED) == 25
    assert toml.loads(toml.dumps(algorithm), Algorithm) == algorithm


@pytest.mark.parametrize(
    "algorithm",
    [
        replace(GRPO, kl=None),
        replace(DAPO, shape=(SoftOverlong(limit=100, cap=None),)),
        replace(DAPO, shape=()),
        replace(GRPO, gate=Clip(0.0, 1.0, dual=3.0)),
        replace(PPO, extra=ValueLoss(0.5, clip=None)),
        replace(VAPO, advantage=TokenWhitened(Gae(decay=0.5, critic_decay=None))),
    ],
)
def test_changed_algorithms_load_back_equal(algorithm: Algorithm):
    assert toml.loads(toml.dumps(algorithm), Algorithm) == algorithm


@given(st.data())
def test_any_mixture_of_pieces_loads_back_equal(data: st.DataObject):
    stages = [stage.name for stage in dataclasses.fields(Algorithm)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnusualChoice)
        algorithm = data.draw(st.sampled_from(NAMED))
        for stage in data.draw(st.lists(st.sampled_from(stages), max_size=3)):
            piece = getattr(data.draw(st.sampled_from(NAMED)), stage)
            try:
                algorithm = replace(algorithm, **{stage: piece})
            except ValueError:
                reject()
        assert toml.loads(toml.dumps(algorithm), Algorithm) == algorithm


dogs = st.builds(Dog, st.text(), st.floats(allow_nan=False))
pets = st.recursive(dogs, lambda inner: st.builds(Cat, st.integers(1, 9), inner | st.none()))
cats = st.builds(Cat, st.integers(1, 9), pets | st.none())
anything = st.recursive(
    st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
houses = st.builds(
    House,
    st.text(),
    dogs,
    pets,
    st.lists(pets, max_size=3).map(tuple),
    st.none() | cats,
    st.none() | pets | st.lists(pets, max_size=3).map(tuple),
    st.sampled_from(["red", "blue", 3]),
    st.integers(),
    st.none() | st.floats(allow_nan=False),
    st.none() | st.floats(allow_nan=False),
    st.booleans(),
    st.tuples(st.floats(0, 1), st.floats(0, 1)),
    st.lists(st.text(), max_size=3).map(tuple),
    st.dictionaries(st.text(), anything, max_size=3),
    st.dictionaries(st.text(), st.floats(allow_nan=False), max_size=3),
)


@pytest.mark.slow("reads many configs")
@given(houses)
def test_any_value_loads_back_equal(house: House):
    text = toml.dumps(house)
    assert toml.loads(text, House) == house
    assert toml.dumps(toml.loads(text, House)) == text


@given(st.text())
def test_any_text_is_either_read_or_refused_with_reasons(text: str):
    try:
        tomllib.loads(text)
        readable = True
    except tomllib.TOMLDecodeError:
        readable = False
    # No text this short has the two keys that House requires.
    assert readable == all("missing" in problem or "unknown" in problem for problem in problems_of(text))
