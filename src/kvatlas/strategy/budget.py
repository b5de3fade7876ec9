"""Budgets: 1.0 is unlimited, a fraction below 1 is of a length, a whole number above 1 (or written ``1``) is tokens."""

from __future__ import annotations

from torch import Tensor

from kvatlas.errors import UserError


def parse_budget(text: str) -> float:
    """``"0.3"`` -> 0.3, ``"1.0"`` -> 1.0 (unlimited), ``"256"`` -> 256.0 tokens, ``"1"`` -> one token, told as -1.0.

    Raises:
        UserError: for zero, negative, or above 1 and not whole.
    """
    try:
        value = float(text)
    except ValueError:
        raise UserError(
            f"budget '{text}' is not a number; write a fraction such as 0.3 or whole tokens such as 256"
        ) from None
    if not 0 < value < float("inf"):
        raise UserError(f"budget {text} must be above 0: a fraction up to 1.0, or whole tokens")
    if value > 1 and value != int(value):
        raise UserError(f"budget {text} is above 1 and not whole: write a fraction up to 1.0, or whole tokens")
    return -1.0 if value == 1 and "." not in text else value


def format_budget(budget: float) -> str:
    """The shortest text that parses back."""
    if budget == -1.0:
        return "1"
    return str(int(budget)) if budget > 1 else repr(budget)


def resolve(budget: float, length: int) -> int | None:
    """Tokens that ``budget`` allows of ``length``; None = no limit."""
    if budget == 1.0:
        return None
    if budget == -1.0:
        return 1
    return int(budget) if budget > 1 else max(1, int(budget * length + 1e-9))


def resolve_all(budget: float, lengths: Tensor) -> Tensor:
    """``resolve`` for a tensor of lengths, at most the length itself."""
    if budget == 1.0:
        return lengths
    if budget == -1.0 or budget > 1:
        return lengths.clamp(max=1 if budget == -1.0 else int(budget))
    return (lengths.double() * budget + 1e-9).long().clamp(min=1).minimum(lengths)


def divide_budget(budget: float, shares: list[float]) -> list[float]:
    """A budget for each share (1 on average), the total unchanged: what a layer cannot use goes to the others.

    Tokens stay whole and at least one, so their total holds within rounding.
    """
    if budget == 1.0:
        return [budget for _ in shares]
    if not 0 < budget < 1:
        tokens = [max(1, round((1 if budget == -1.0 else budget) * share)) for share in shares]
        return [-1.0 if n == 1 else float(n) for n in tokens]
    full: set[int] = set()
    while True:
        left = budget * len(shares) - len(full)
        weight = sum(share for i, share in enumerate(shares) if i not in full)
        given = [1.0 if i in full else left * share / weight for i, share in enumerate(shares)]
        more = {i for i, value in enumerate(given) if value >= 1.0} - full
        if not more:
            return given
        full |= more
