"""lm-eval's command with the model ``kvatlas``: ``python -m kvatlas.quality.reasoning --model kvatlas --tasks ...``.

lm-eval 0.4 knows the models of its own package only, and has no entry point for those of others; what it documents for
them is to register the model and then to call its command, which is what this does. All options are lm-eval's:

    python -m kvatlas.quality.reasoning --model kvatlas \
        --model_args pretrained=smollm2,strategy=h2o:0.3,dtype=float32 --tasks hellaswag --num_fewshot 5 --limit 100
"""

from __future__ import annotations

import sys

from kvatlas.errors import UserError
from kvatlas.quality.reasoning.extra import need_lm_eval


def main() -> None:
    """Run lm-eval's command; bad input is one line on stderr and status 2."""
    try:
        need_lm_eval()
        from lm_eval.__main__ import cli_evaluate

        import kvatlas.quality.reasoning.model  # noqa: F401  registers the model

        cli_evaluate()
    except UserError as error:
        print(f"kvatlas: {error}", file=sys.stderr)
        sys.exit(2)
    except ValueError as error:
        if not str(error).startswith("Tasks not found"):
            raise
        print(f"kvatlas: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
