"""A model that a function makes: what it is called with, and what it may return."""

import sys

import pytest
import torch

from whet.errors import ConfigError, DataError
from whet.models.model_factory import call_model_factory


def good(folder, seed):
    return f"{folder}-{seed}"


def nothing(folder):
    return folder


def bare():
    return "x"


def more(folder, seed, size):
    return folder


def raises(**how):
    raise ZeroDivisionError("by nothing")


def leaves(**how):
    sys.exit(3)


def own(**how):
    raise DataError("no such rows")


def module(**how):
    made = torch.nn.Linear(1, 1)
    made.save_pretrained = None
    return made


def none(**how):
    return None


def empty(**how):
    return ""


constant = 3


def test_it_is_called_with_folder_and_seed():
    assert call_model_factory(f"{__name__}:good", "there", 7) == "there-7"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nothing", r"takes \(folder\): got an unexpected keyword argument 'seed'"),
        ("bare", "unexpected keyword argument 'folder'"),
        ("more", "missing a required argument: 'size'"),
        ("raises", "raised ZeroDivisionError: by nothing"),
        ("leaves", "raised SystemExit: 3"),
        ("module", r"returned a Linear \(save it: model.save_pretrained\(folder\)\)"),
        ("none", "returned a NoneType"),
        ("empty", "returned an empty name"),
    ],
)
def test_what_goes_wrong_says_how_it_is_called(name, says):
    with pytest.raises(ConfigError, match=rf"model '\S+:{name}' .*{says}.*; it is called as function\(folder="):
        call_model_factory(f"{__name__}:{name}", "there", 0)


def test_what_is_no_function_and_errors_of_whets_own_say_so_themselves():
    with pytest.raises(ConfigError, match="must be a function or a class"):
        call_model_factory(f"{__name__}:constant", "there", 0)
    with pytest.raises(DataError, match=r"^no such rows$"):
        call_model_factory(f"{__name__}:own", "there", 0)
