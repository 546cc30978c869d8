"""Make a plan run: attach it to a model, and take it off again."""

from .attaching import Attached, attach, attach_functions, without_slots

__all__ = ["Attached", "attach", "attach_functions", "without_slots"]
