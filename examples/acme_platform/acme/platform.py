"""What hf_compile needs to know of the Acme accelerator."""

import sys

from hf_compile import Platform


class Acme(Platform):
    """An accelerator whose tensors torch calls "cpu", since this example has to run anywhere.

    A real one has a device type of its own (`torch.utils.rename_privateuse1_backend`) and needs no `is_current`.
    """

    name = "acme"
    device_type = "cpu"
    simple_compile_backend = "acme"
    supports_dynamic_compile = True
    package = "acme-platform"

    def is_current(self) -> bool:
        """Only in programs that have loaded the runtime."""
        return "acme.runtime" in sys.modules
