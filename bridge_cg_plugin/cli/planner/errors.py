"""Input that a plan cannot be made from."""


class PlanError(ValueError):
    """A file, a size or an option that the planner cannot use; says which, what it holds and what is allowed."""
