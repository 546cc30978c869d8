"""Counts go up by what was added, and `expect` fails when they did not."""

import threading

import pytest

from hf_compile import CompilationCounter, compilation_counter


@pytest.mark.smoke
def test_expect_holds():
    counter = CompilationCounter(num_graphs_seen=4)
    with counter.expect(num_graphs_seen=2, num_eager_calls=0):
        counter.add(num_graphs_seen=2)
    assert counter.to_dict() == {
        "num_models_seen": 0,
        "num_graphs_seen": 6,
        "num_backend_compilations": 0,
        "num_compile_failures": 0,
        "num_eager_calls": 0,
    }


@pytest.mark.parametrize("found", [0, 1, 3])
def test_expect_fails(found):
    counter = CompilationCounter(num_graphs_seen=4)
    sentence = rf"^compilation_counter: num_graphs_seen: expected a change of 2, found {found}$"
    with pytest.raises(AssertionError, match=sentence), counter.expect(num_graphs_seen=2, num_models_seen=0):
        counter.add(num_graphs_seen=found)


def test_expect_names_every_wrong_count():
    counter = CompilationCounter()
    wrong = "num_graphs_seen: expected a change of 1, found 0; num_eager_calls: expected a change of 0, found 2"
    with pytest.raises(AssertionError, match=wrong), counter.expect(num_graphs_seen=1, num_eager_calls=0):
        counter.add(num_eager_calls=2)


def test_expect_does_not_hide_the_error_of_its_body():
    with pytest.raises(KeyError), CompilationCounter().expect(num_graphs_seen=1):
        raise KeyError


def test_a_count_that_is_not_there():
    counter = CompilationCounter()
    with pytest.raises(AttributeError, match="num_grafs_seen"), counter.expect(num_grafs_seen=0):
        pass
    with pytest.raises(AttributeError, match="num_grafs_seen"):
        counter.add(num_grafs_seen=1)


def test_counters_are_apart():
    counter = CompilationCounter()
    with compilation_counter.expect(num_graphs_seen=0):
        counter.add(num_graphs_seen=1)
    assert counter != CompilationCounter()


def test_no_count_is_lost_between_threads():
    counter = CompilationCounter()
    threads = [threading.Thread(target=lambda: [counter.add(num_eager_calls=1) for _ in range(500)]) for _ in range(4)]
    with counter.expect(num_eager_calls=2000):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
