"""Measured runs into constants: the factors of a user's profile, and those that the library itself was calibrated with."""

from planner.questions.calibrate.constants import Constant, Evidence, Refit, constants, refit, with_constants

__all__ = ["Constant", "Evidence", "Refit", "constants", "refit", "with_constants"]
