"""What happened: statistics, timelines, reports with advice, plots, and the reports of many ranks."""

from ..engine.statistics import Reason, Statistics, TimelineRecorder
from .holders import HeldStorage, Holder
from .plots import Frontier
from .report import GroupReport, RankReports, Report, gather_reports
from .synchronization import Synchronization, Synchronizations, find_synchronizations

__all__ = [
    "Frontier",
    "GroupReport",
    "HeldStorage",
    "Holder",
    "RankReports",
    "Reason",
    "Report",
    "Statistics",
    "Synchronization",
    "Synchronizations",
    "TimelineRecorder",
    "find_synchronizations",
    "gather_reports",
]
