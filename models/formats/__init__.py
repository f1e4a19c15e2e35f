"""Checkpoint formats: each module has `detect(path) -> bool` and `load(path, dtype) -> LoadedModel`."""
