"""Will a run fit, and how long will it take? Answered before anything starts."""
