"""What happened: statistics, timelines, reports with advice, plots, and the reports of many ranks."""

from ..engine.recorder import TimelineRecorder
from ..engine.statistics import Reason, Statistics
from .groups import GroupReport, HeldStorage, Holder
from .ranks import RankReports, gather_reports
from .report import Report
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
