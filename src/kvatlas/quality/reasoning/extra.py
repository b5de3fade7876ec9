"""lm-eval is an extra: what needs it says so in one line."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from kvatlas.errors import UserError


def need_lm_eval() -> str:
    """lm-eval's version. Raises UserError where it is not installed."""
    try:
        import lm_eval
    except ImportError as error:
        raise UserError(f"the reasoning tasks need lm-eval ({error}): pip install 'kvatlas[quality]'") from None
    return lm_eval.__version__


@contextmanager
def quiet() -> Iterator[None]:
    """Only lm-eval's errors: its warnings are of options that its users set, and here nobody does."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
