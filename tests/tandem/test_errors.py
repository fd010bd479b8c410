from __future__ import annotations

import inspect
import pickle

import pytest

from tandem import errors
from tandem.errors import ServingError
from tandem.testing.errors import EXAMPLES


def test_examples_cover_the_tree() -> None:
    classes = {
        member
        for member in vars(errors).values()
        if inspect.isclass(member) and issubclass(member, ServingError)
    }
    assert {type(error) for error in EXAMPLES} == classes


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_errors_survive_pickling(error: ServingError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert copy.args == error.args
    assert vars(copy) == vars(error)
    assert str(copy) == str(error)


def test_tree_is_the_one_that_the_module_draws() -> None:
    drawn = errors.__doc__ or ""
    assert all(type(error).__name__ in drawn for error in EXAMPLES)
