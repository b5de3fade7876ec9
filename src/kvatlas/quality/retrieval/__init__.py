"""Whether one item can be read out of a long context after the compression."""

from kvatlas.quality.retrieval.listing import KeyValueTask, LinesTask
from kvatlas.quality.retrieval.needle import NeedleTask
from kvatlas.quality.retrieval.topics import TopicsTask

__all__ = ["KeyValueTask", "LinesTask", "NeedleTask", "TopicsTask"]
