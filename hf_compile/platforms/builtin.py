"""The platforms that hf_compile knows by itself.

None of them imports its vendor's package: a platform is recognised by what the program has loaded, and its backend is
looked up when a model is compiled. Sources: the vendors' pages on `torch.compile`.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys

import torch

from ..config import environment_compiler
from .platform import Platform

__all__ = ["BUILTIN"]


class Cpu(Platform):
    """Any processor; Inductor writes C++."""

    name = device_type = "cpu"

    def missing_toolchain(self) -> str | None:
        """Inductor calls the compiler that CXX names, else the usual one."""
        named = environment_compiler()
        usual = {"darwin": ("clang++", "g++"), "win32": ("cl",)}.get(sys.platform, ("g++", "clang++"))
        if any(shutil.which(compiler) for compiler in ([named] if named else usual)):
            return None
        missing = f"the compiler that CXX names, {named}, is not found" if named else "no C++ compiler is found"
        return f"Inductor writes C++ for the CPU, and {missing}: install {usual[0]}, or name another in CXX"


class _WithTriton(Platform):
    def missing_toolchain(self) -> str | None:
        """Inductor writes Triton kernels."""
        if importlib.util.find_spec("triton") is not None:
            return None
        return f"Inductor writes Triton kernels for {self.name}, and triton is not installed: pip install triton"


class Cuda(_WithTriton):
    """NVIDIA GPUs."""

    name = device_type = "cuda"

    def is_current(self) -> bool:
        """A torch built for ROCm says "cuda" too."""
        return torch.version.hip is None


class Rocm(_WithTriton):
    """AMD GPUs."""

    name = "rocm"
    device_type = "cuda"

    def is_current(self) -> bool:
        """A torch built for ROCm has the version of HIP."""
        return torch.version.hip is not None


class Xpu(_WithTriton):
    """Intel GPUs."""

    name = device_type = "xpu"


class Mps(Platform):
    """Apple GPUs; Inductor writes Metal."""

    name = device_type = "mps"


class Tpu(Platform):
    """Google TPUs through torch_xla; XLA compiles each shape for itself."""

    name = "tpu"
    device_type = "xla"
    simple_compile_backend = "openxla"
    supports_dynamic_compile = False
    package = "torch_xla[tpu]"

    def is_current(self) -> bool:
        """Whatever torch_xla runs on that is not Neuron: XLA compiles in the same way for all."""
        return not _is_neuron()


class Neuron(Platform):
    """AWS Neuron devices through torch_xla; XLA compiles each shape for itself."""

    name = "neuron"
    device_type = "xla"
    simple_compile_backend = "openxla"
    supports_dynamic_compile = False
    package = "torch-neuronx"

    def is_current(self) -> bool:
        """The XLA runtime says what it runs on, or the vendor's package is loaded."""
        return _is_neuron()


class TorchNeuron(Platform):
    """AWS Neuron devices by themselves, without XLA; each signature of inputs is compiled for itself."""

    name = "torch_neuron"
    device_type = "neuron"
    simple_compile_backend = "neuron"
    supports_dynamic_compile = False
    package = "torch-neuronx"


class Hpu(Platform):
    """Intel Gaudi."""

    name = device_type = "hpu"
    simple_compile_backend = "hpu_backend"
    package = "habana-torch-plugin"


class Npu(Platform):
    """Huawei Ascend."""

    name = device_type = "npu"
    simple_compile_backend = "npu"
    package = "torch-npu"


class Meta(Platform):
    """Models without data: nothing runs there, and what will run them is not known yet."""

    name = device_type = "meta"


def _is_neuron() -> bool:
    runtime = sys.modules.get("torch_xla.runtime")
    device_type = getattr(runtime, "device_type", None)
    return device_type() == "NEURON" if device_type is not None else "torch_neuronx" in sys.modules


BUILTIN = tuple(cls() for cls in (Cpu, Cuda, Rocm, Xpu, Mps, Tpu, Neuron, TorchNeuron, Hpu, Npu, Meta))
