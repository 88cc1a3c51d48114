"""When to look, for users: ``from sensli.triggers import Every``. What is here lives in `sensli.growing`."""

from sensli.growing.triggers import At, AtMost, Budget, Diminishing, Every, Moment, Pays, Plateau, Trigger

__all__ = ["At", "AtMost", "Budget", "Diminishing", "Every", "Moment", "Pays", "Plateau", "Trigger"]
