"""`jaxpage fetch`, and the loading of models that commands share: models known by name are downloaded first."""

import dataclasses
import pathlib
from typing import Annotated

import tqdm
import tyro

from jaxpage import fetch
from models import LoadedModel, load_model

__all__ = ["Fetch", "load_named_model"]


@dataclasses.dataclass(frozen=True)
class Fetch:
    """Download a model by name and print its path. A model that is there already is not downloaded again."""

    name: Annotated[str, tyro.conf.Positional]
    """Which model: smollm2-135m."""

    def run(self) -> None:
        """Fetches with a progress bar on stderr."""
        print(_fetch(self.name))


def load_named_model(model: str, dtype: str) -> LoadedModel:
    """Loads a model, fetching it first where it is one of the known names."""
    source = _fetch(model) if model in fetch.KNOWN_MODELS else model
    return load_model(source, dtype=dtype)


def _fetch(name: str) -> pathlib.Path:
    with tqdm.tqdm(desc=name, unit="B", unit_scale=True, disable=None, leave=False) as bar:

        def report(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        return fetch.fetch_model(name, report=report)
