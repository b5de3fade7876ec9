"""Short reasoning tasks, asked and judged as lm-eval does, and a model that lm-eval can run under any strategy."""

from kvatlas.quality.reasoning.records import NAMES
from kvatlas.quality.reasoning.tasks import ReasoningTask, reasoning_task

__all__ = ["NAMES", "ReasoningTask", "reasoning_task"]
