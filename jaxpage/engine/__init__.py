"""Continuous batching: the public names."""

from jaxpage.engine.drafts import Speculation
from jaxpage.engine.engine import Engine
from jaxpage.engine.options import EngineOptions
from jaxpage.engine.stats import EngineStats

__all__ = ["Engine", "EngineOptions", "EngineStats", "Speculation"]
