"""How far two outputs are apart, and how far rounding lets them be."""

import math

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from hf_compile.verification import largest_difference, tolerance

INF, NAN = math.inf, math.nan


def values(*numbers, dtype=torch.float32):
    return torch.tensor(numbers, dtype=dtype)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("got", "want", "difference"),
    [
        (values(1.0, 2.0), values(1.0, 2.0), 0),
        (values(1.0, 2.5), values(1.0, 2.0), 0.25),  # relative to the largest value of the tensor
        (values(0.5), values(0.0), 0.5),  # zeros have no scale
        (values(1.0, NAN), values(1.0, NAN), 0),
        (values(1.0, INF), values(1.0, INF), 0),
        (values(2.0, INF), values(1.0, INF), 1),
        (values(NAN), values(1.0), INF),
        (values(1.0), values(NAN), INF),
        (values(INF), values(1.0), INF),
        (values(-INF), values(INF), INF),
        (values(), values(), 0),
        (values(1, 2, dtype=torch.int64), values(1, 2, dtype=torch.int64), 0),
        (values(1, 3, dtype=torch.int64), values(1, 2, dtype=torch.int64), INF),
        (values(True, dtype=torch.bool), values(False, dtype=torch.bool), INF),
        (values(1.0), values(1.0, dtype=torch.float64), INF),
        (values(1.0, 1.0), values(1.0), INF),
        (None, None, 0),
        (values(1.0), None, INF),
        (None, values(1.0), INF),
        ((values(1.0), values(5.0)), (values(1.0), values(4.0)), 0.25),
        ((values(1.0),), (values(1.0), values(4.0)), INF),
        ([(values(3.0), None)], [(values(2.0), None)], 0.5),
        ({"a": values(3.0)}, {"a": values(2.0)}, 0.5),
        ({"a": values(3.0)}, {"b": values(3.0)}, INF),
        (values(1.0), (values(1.0),), INF),
        (BaseModelOutput(last_hidden_state=values(3.0)), BaseModelOutput(last_hidden_state=values(2.0)), 0.5),
        (
            BaseModelOutput(last_hidden_state=values(3.0)),
            BaseModelOutput(last_hidden_state=values(3.0), attentions=(values(1.0),)),
            INF,
        ),
    ],
)
def test_largest_difference(got, want, difference):
    assert largest_difference(got, want) == difference


def test_a_difference_below_half_precision_is_seen():
    assert 0 < largest_difference(values(1.0 + 2**-20), values(1.0)) < tolerance(values(1.0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_tolerance_stands_between_a_rounding_and_a_mistake(dtype):
    exact = torch.linspace(-1, 1, 101, dtype=torch.float64)
    rounded = exact.to(dtype)
    bound = tolerance(rounded)
    assert largest_difference(rounded.double(), exact) <= bound
    assert largest_difference(rounded * 1.1, rounded) > bound


def test_tolerance_is_that_of_the_coarsest_dtype():
    mixed = (values(1.0), {"a": values(1.0, dtype=torch.bfloat16), "b": values(1, dtype=torch.int64)})
    assert tolerance(mixed) == tolerance(values(1.0, dtype=torch.bfloat16)) > tolerance(values(1.0))
    assert tolerance(values(1, dtype=torch.int64)) == tolerance(None) == 0
