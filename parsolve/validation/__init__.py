"""Predicted against measured: published or own runs, read from a table and evaluated with the solver's functions."""

from __future__ import annotations

from parsolve.validation.metrics import summarise
from parsolve.validation.prediction import Prediction, predict
from parsolve.validation.runs import Run, Runs, read_runs

__all__ = ["Prediction", "Run", "Runs", "predict", "read_runs", "summarise"]
