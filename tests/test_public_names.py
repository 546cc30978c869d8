"""Public names are what they say, whatever else was imported, and their examples run."""

import doctest
import importlib
import inspect
import pkgutil
import types

import pytest

import hf_compile

ROOMS = sorted(
    module.name
    for module in pkgutil.walk_packages(hf_compile.__path__, "hf_compile.")
    if module.name != "hf_compile.__main__"
)
DOCUMENTED = [name for name in hf_compile.__all__ if not isinstance(getattr(hf_compile, name), (int, str))]


def origin(name):
    room = next(room for room, names in hf_compile._WHERE.items() if name in names)
    return getattr(importlib.import_module(f"hf_compile.{room}"), name)


@pytest.mark.smoke
def test_names_stay_when_every_room_is_imported():
    assert len(ROOMS) > 15
    for room in ROOMS:
        importlib.import_module(room)
    for name in set(hf_compile.__all__) - {"__version__"}:
        value = getattr(hf_compile, name)
        assert value is origin(name)
        assert not isinstance(value, types.ModuleType)
        assert callable(value) or name in ("MAX_INT32", "compilation_counter")


@pytest.mark.smoke
def test_no_room_has_a_public_name():
    assert not {room.rpartition(".")[2] for room in ROOMS} & set(hf_compile.__all__)


def test_all_is_sorted_and_complete():
    assert hf_compile.__all__ == sorted(set(hf_compile.__all__))
    assert dir(hf_compile) == hf_compile.__all__
    with pytest.raises(AttributeError, match=r"^module 'hf_compile' has no attribute 'compile_encoder'$"):
        hf_compile.compile_encoder  # noqa: B018


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_says_its_duty_and_its_names(room):
    module = importlib.import_module(room)
    assert module.__doc__
    names = getattr(module, "__all__", [])
    assert len(names) == len(set(names))
    assert all(hasattr(module, name) for name in names)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_docstring(name):
    value = getattr(hf_compile, name)
    assert value.__doc__  # its own, not that of a parent
    if inspect.isclass(value):
        members = {
            each: member for each, member in vars(value).items() if not each.startswith("_") and callable(member)
        }
        assert [each for each in members if not inspect.getdoc(getattr(value, each))] == []


@pytest.mark.parametrize(
    ("name", "built_in"),
    [
        ("ConfigurationError", ValueError),
        ("BackendError", ValueError),
        ("EncoderNotFoundError", LookupError),
        ("UnsupportedModelError", TypeError),
        ("CompileRangeError", ValueError),
        ("RegionCompileError", RuntimeError),
        ("VerificationError", ArithmeticError),
    ],
)
def test_errors_derive_from_built_in_ones(name, built_in):
    assert issubclass(getattr(hf_compile, name), hf_compile.HfCompileError)
    assert issubclass(getattr(hf_compile, name), built_in)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_examples(name):
    value = getattr(hf_compile, name)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in doctest.DocTestFinder().find(value, name, globs={}):
        runner.run(test)
    assert runner.failures == 0


def test_an_example_that_is_wrong_fails():
    def wrong():
        """
        >>> 1 + 1
        3
        """

    runner = doctest.DocTestRunner(verbose=False)
    for test in doctest.DocTestFinder().find(wrong, "wrong", globs={}):
        runner.run(test, out=lambda _: None)
    assert runner.failures == 1
