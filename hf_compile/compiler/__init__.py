"""Make a plan run: attach it to a model, and take it off again."""

from .attaching import Attached, attach

__all__ = ["Attached", "attach"]
