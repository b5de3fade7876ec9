"""Results for people, from stored records only: `result_block` for the terminal, `write_report` for the browser."""

from kvatlas.report.page import write_report
from kvatlas.report.terminal import result_block, result_text

__all__ = ["result_block", "result_text", "write_report"]
