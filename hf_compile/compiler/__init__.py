"""Make a plan run: attach it to a model, and take it off again."""

from .attaching import Attached, attach, without_slots

__all__ = ["Attached", "attach", "without_slots"]
