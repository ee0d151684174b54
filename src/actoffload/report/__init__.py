"""What happened: statistics, timelines, reports with advice, and the reports of many ranks."""

from ..engine.recorder import TimelineRecorder
from ..engine.statistics import Reason, Statistics
from .held import HeldStorage, Holder
from .ranks import RankReports, gather_reports
from .report import GroupReport, Report
from .step_timeline import LayerTimes, StepTimeline
from .synchronization import Synchronization, Synchronizations, find_synchronizations

__all__ = [
    "GroupReport",
    "HeldStorage",
    "Holder",
    "LayerTimes",
    "RankReports",
    "Reason",
    "Report",
    "Statistics",
    "StepTimeline",
    "Synchronization",
    "Synchronizations",
    "TimelineRecorder",
    "find_synchronizations",
    "gather_reports",
]
