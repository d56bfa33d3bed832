"""Parts of a step, two at a time."""

import threading

import pytest

from proximo.insight.lens.threads import AT_ONCE, Made, computed


@pytest.mark.parametrize(("threads", "ahead"), [(True, AT_ONCE), (False, 1)])
def test_parts_come_in_order_and_few_are_taken_before_they_are_needed(threads, ahead):
    taken = []

    def parts():
        for number in range(9):
            taken.append(number)
            yield number

    for place, found in enumerate(computed(lambda part: part * part, parts(), threads=threads)):
        assert found == place * place
        assert len(taken) <= place + ahead
    assert taken == list(range(9))


def test_two_parts_are_computed_at_a_time():
    both = threading.Barrier(2, timeout=60)
    assert len(list(computed(lambda part: both.wait(), range(4)))) == 4


@pytest.mark.parametrize("threads", [True, False])
def test_what_a_part_raises_is_raised(threads):
    with pytest.raises(ZeroDivisionError):
        list(computed(lambda part: 1 // part, [1, 0, 1, 1], threads=threads))


def test_what_is_made_is_made_each_time():
    made = []
    squares = Made(lambda part: made.append(part) or part * part, [1, 2, 3])
    assert list(squares) == list(squares) == [1, 4, 9]
    assert made == [1, 2, 3, 1, 2, 3]


def test_what_cannot_be_made_is_raised_and_does_not_end_the_rest():
    with pytest.raises(IndexError, match="out of range"):
        list(Made(lambda part: [1][part], [0, 1, 0]))
