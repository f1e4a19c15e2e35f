"""Continuous batching: the public names."""

from jaxpage.engine.drafts import Speculation
from jaxpage.engine.engine import Engine, EngineStats
from jaxpage.engine.options import EngineOptions

__all__ = ["Engine", "EngineOptions", "EngineStats", "Speculation"]
