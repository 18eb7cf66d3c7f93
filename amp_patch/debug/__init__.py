"""What a run can tell of itself: statistics of its operators, overflows and their causes.

Nothing here runs unless it is asked to; knows the session and no command line.
"""

# First, and whole: a tool that is started when it has been imported imports from here.
import amp_patch.session  # noqa: F401

from .cause import Cause
from .op_stats import OpStats, op_stats
from .overflow import OverflowReport, overflow_report
from .ranges import Range
from .summary import Summary, summary

__all__ = [
    "Cause",
    "OpStats",
    "OverflowReport",
    "Range",
    "Summary",
    "op_stats",
    "overflow_report",
    "summary",
]
