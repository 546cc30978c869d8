"""What torch says of a region that does not compile, in one sentence: file and line, cause, what to do."""

import inspect
import pathlib

import pytest
import torch
from torch import nn

from hf_compile.explanation import explain


class Item(nn.Module):
    def forward(self, x):
        count = x.sum().long().item()
        return x if count > 3 else x + 1


class Printed(nn.Module):
    def forward(self, x):
        print(x.sum())
        return x + 1


class Branch(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x
        return -x


class Broken(nn.Module):
    def forward(self, x):
        torch._dynamo.graph_break()
        return x + 1


class Inside(nn.Module):
    def __init__(self):
        super().__init__()
        self.branch = Branch()

    def forward(self, x):
        return self.branch(x)


class Straight(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def sentence(module, x=None, backend="eager"):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - torch has a dozen kinds
        torch.compile(module, fullgraph=True, backend=backend)(torch.ones(4) if x is None else x)
    assert caught.type.__module__.startswith("torch.")
    return explain(caught.value)


def line_of(cls, code):
    lines, start = inspect.getsourcelines(cls)
    return f"{__file__}:{start + next(index for index, line in enumerate(lines) if code in line)} in forward: "


@pytest.mark.parametrize(
    ("module", "at", "code", "cause", "hint"),
    [
        pytest.param(
            Item,
            Item,
            "count > 3",
            "Could not guard on data-dependent expression u0 > 3",
            "the code branches on values that only a run can tell: write it with torch.where, or keep its class ",
            marks=pytest.mark.smoke,
        ),
        (Branch, Branch, "if x.sum()", "Data-dependent branching (Detected ", "torch.where"),
        (Inside, Branch, "if x.sum()", "Data-dependent branching (Detected ", "torch.where"),
        (
            Printed,
            Printed,
            "print(",
            "Failed to trace builtin operator (Dynamo does not know ",
            "Avoid calling builtin ",
        ),
        (Broken, Broken, "graph_break()", "Call to `torch._dynamo.graph_break()` (User-inserted ", "Remove the "),
    ],
    ids=["item", "branch", "branch inside", "print", "graph break"],
)
def test_where_why_and_what_to_do(module, at, code, cause, hint):
    told = sentence(module())
    assert told.startswith(line_of(at, code) + cause)
    assert hint in told.partition("; ")[2]
    assert "\n" not in told


def test_what_compiles_is_no_error():
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        sentence(Straight())


def test_a_dim_declared_dynamic_that_the_code_fixes():
    x = torch.ones(3, 4)
    torch._dynamo.mark_dynamic(x, 1)
    assert sentence(Straight(), x) == (
        line_of(Straight, "self.linear(x)")
        + "L['x'].size()[1] was declared dynamic, and the code fixes it at 4; take it out of dynamic_arg_dims"
    )


def test_an_error_of_the_backend():
    def picky(graph, inputs):
        raise RuntimeError("no kernel for this\nand more")

    assert sentence(Straight(), backend=picky) == "backend='picky' raised RuntimeError: no kernel for this"


FRAME = '  File "{}", line 7, in forward\n    x\n'


@pytest.mark.parametrize(
    ("files", "where"),
    [
        (["/home/me/model.py"], "/home/me/model.py:7 in forward: "),
        (["/home/me/hf_compile/model.py"], "/home/me/hf_compile/model.py:7 in forward: "),  # not this package
        ([explain.__code__.co_filename], ""),
        (["/home/me/model.py", torch.__file__], "/home/me/model.py:7 in forward: "),
        (["/home/me/model.py", inspect.__file__], "/home/me/model.py:7 in forward: "),
        ([str(pathlib.Path(torch.__file__).parents[1] / "transformers/a.py")], "transformers/a.py:7 in forward: "),
        ([torch.__file__], "torch/__init__.py:7 in forward: "),
        ([], ""),
    ],
)
def test_the_line_is_one_of_the_model(files, where):
    text = "Something is missing.\n\nfrom user code:\n" + "".join(map(FRAME.format, files))
    assert explain(RuntimeError(text)) == f"{where}Something is missing"


def test_errors_without_frames():
    assert explain(RuntimeError("")) == "RuntimeError"
    assert explain(RuntimeError("InvalidCxxCompiler: none")) == (
        "InvalidCxxCompiler: none; install a C++ compiler (g++ or clang++), or pass backend='eager' to go without"
    )
