"""What happened: statistics, timelines, reports with advice, plots, and the reports of many ranks."""

from ..engine.statistics import Reason, Statistics, TimelineRecorder
from .groups import GroupReport, HeldStorage, Holder
from .plots import Frontier
from .ranks import RankReports, gather_reports
from .report import Advice, Report
from .step_timeline import LayerTimes, StepTimeline
from .synchronization import Synchronization, Synchronizations, find_synchronizations

__all__ = [
    "Advice",
    "Frontier",
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
