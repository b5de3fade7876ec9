"""Whether what was told in a conversation is still there after the compression."""

from kvatlas.quality.retention.task import RetentionTask

__all__ = ["RetentionTask"]
