"""The measured default: passes that are timed, what they show, and the plan that follows, alike in all ranks."""
