"""The encoders of Transformers, by the kind of their inputs."""

from .audio import AUDIO
from .images import IMAGES
from .masked import MASKED
from .others import OTHERS
from .packed import PACKED

__all__ = ["TABLES"]

TABLES = (PACKED, IMAGES, MASKED, AUDIO, OTHERS)
