"""Values that autograd saved and that were dropped are made again in backward, by the operators that made them."""

from .call import FollowingCall, Remake, TracedCall
from .policy import Policy, PolicyArgument, everything, names_of, policy_for, saving
from .program import Program
from .proof import Alarm, Times, measure
from .trace import FunctionCall, Trace, same
from .tracer import Tracer, remove_tracers

__all__ = [
    "Alarm",
    "FollowingCall",
    "FunctionCall",
    "Policy",
    "PolicyArgument",
    "Program",
    "Remake",
    "Times",
    "Trace",
    "TracedCall",
    "Tracer",
    "everything",
    "measure",
    "names_of",
    "policy_for",
    "remove_tracers",
    "same",
    "saving",
]
