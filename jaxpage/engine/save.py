"""An engine on disk: what the host knows as JSON, arrays through Orbax, and the way back."""

import dataclasses
import json
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Array

from jaxpage.checkpoint import restore_arrays, save_arrays
from jaxpage.engine.constraint import AllowedTokens
from jaxpage.engine.options import EngineOptions
from jaxpage.engine.saved_seq import load_seq, load_update, seq_state, update_state
from jaxpage.engine.swap import Swapped
from jaxpage.model import ModelSizes
from jaxpage.prefix.saved import index_state, load_state
from jaxpage.prefix.tree import PrefixTree

if TYPE_CHECKING:
    from jaxpage.engine.engine import Engine

__all__ = ["check_same", "load_engine", "read_host", "save_engine"]

_FORMAT = 1
_SIZES = ("vocab_size", "num_layers", "num_kv_heads", "head_dim", "max_length")  # what every model has (see `ModelSizes`)
_HOST = "engine.json"
_ARRAYS = "arrays-"  # what follows is new for each save; the host's file names the one that belongs to it


def made_for(
    sizes: ModelSizes, draft_sizes: ModelSizes | None, options: EngineOptions, eos_ids: Sequence[int]
) -> dict[str, dict[str, Any]]:
    """What an engine and the one restored from it must have in common, in the types of JSON."""
    same = {
        "model": _sizes(sizes),
        "draft model": {} if draft_sizes is None else _sizes(draft_sizes),
        "options": dataclasses.asdict(options),
        "engine": {"eos_ids": list(eos_ids)},
    }
    return json.loads(json.dumps(same))


def _sizes(sizes: ModelSizes) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(sizes)] if dataclasses.is_dataclass(sizes) else _SIZES
    return {name: getattr(sizes, name) for name in names}


def check_same(
    host: Mapping[str, Any], sizes: ModelSizes, draft_sizes: ModelSizes | None, options: EngineOptions, eos_ids: Sequence[int]
) -> None:
    """Raises where a saved engine cannot go on in another.

    Raises:
      ValueError: says what differs.
    """
    saved, given = host["made_for"], made_for(sizes, draft_sizes, options, eos_ids)
    differences = [
        f"{name} of the {group} is {saved[group].get(name)!r} there and {given[group].get(name)!r} here"
        for group in given
        for name in {**saved[group], **given[group]}
        if saved[group].get(name) != given[group].get(name)
    ]
    if differences:
        raise ValueError(f"the saved engine cannot go on here: {'; '.join(differences)}")


def save_engine(engine: "Engine", folder: Path) -> None:
    """Writes an engine of which nothing is under way. See `Engine.save`."""
    index = engine.index
    if index is not None and not isinstance(index, PrefixTree):
        raise ValueError(f"an index of class {type(index).__name__} cannot be saved")
    seqs = list(engine._runner.seqs.values())
    draft_sizes = None if engine._draft_model is None else engine._draft_model.config
    arrays = folder / f"{_ARRAYS}{secrets.token_hex(8)}"
    host: dict[str, Any] = {
        "format": _FORMAT,
        "made_for": made_for(engine._device.model.config, draft_sizes, engine.options, engine._intake.eos_ids),
        "arrays": arrays.name,
        "next_id": engine._next_id,
        "stats": engine._runner.stats._asdict(),
        "news": [update_state(update) for update in engine._runner.news.waiting],
        "seqs": [seq_state(seq) for seq in seqs],
        "running": [seq.id for seq in engine._scheduler.running],
        "waiting": [seq.id for seq in engine._scheduler.waiting],
        "swapped": {str(seq.id): _swapped_state(seq.swapped) for seq in seqs if seq.swapped is not None},
        "index": None if index is None else index_state(index),
    }
    folder.mkdir(parents=True, exist_ok=True)
    arrays.mkdir()
    save_arrays(arrays / "state", _numbered(_arrays(engine)))
    for seq in seqs:
        if seq.swapped is not None:
            save_arrays(arrays / f"swapped-{seq.id}", _numbered(seq.swapped.layers))
    _write_through(arrays)
    part = folder / f"{_HOST}.part"
    with part.open("w", encoding="utf-8") as file:
        json.dump(host, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(folder / _HOST)  # from here on the folder holds this state; up to here, the one before
    _sync(folder)
    for other in folder.glob(f"{_ARRAYS}*"):
        if other != arrays:
            shutil.rmtree(other)


def read_host(folder: Path) -> dict[str, Any]:
    """The host's part of a saved engine.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it is broken, or of another format.
    """
    file = folder / _HOST
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist: no engine was saved there")
    try:
        host = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is broken: {error}") from error
    if not isinstance(host, dict) or host.get("format") != _FORMAT:
        raise ValueError(f"{file} is no saved engine of format {_FORMAT}")
    return host


def load_engine(engine: "Engine", folder: Path, host: Mapping[str, Any], allowed_tokens: Mapping[int, AllowedTokens]) -> None:
    """Makes a new engine what another was when it was saved.

    Raises:
      ValueError: the arrays are broken or of other shapes, a request lacks its function, or the index is of another kind.
    """
    arrays = folder / host["arrays"]
    _set_arrays(engine, restore_arrays(arrays / "state", _numbered(_arrays(engine))))
    seqs = {state["id"]: load_seq(state, engine._intake.eos_ids, engine._intake.detokenize, allowed_tokens) for state in host["seqs"]}
    for state in host["seqs"]:
        seqs[state["id"]].parent = seqs.get(state["parent"])
    storage = engine._device.state.cache.storage
    for name, state in host["swapped"].items():
        like = jax.tree.map(lambda leaf, count=state["blocks"]: jax.ShapeDtypeStruct((count, *leaf.shape[1:]), leaf.dtype), storage)
        leaves = _in_order(restore_arrays(arrays / f"swapped-{name}", _numbered(like)))
        swapped = Swapped(jax.device_get(jax.tree.unflatten(jax.tree.structure(storage), leaves)), state["length"])
        seqs[int(name)].swapped = swapped
        engine._memory.swapped_bytes += swapped.nbytes
    index, ledger = engine.index, engine._memory.ledger
    if index is not None:
        if not isinstance(index, PrefixTree):
            raise ValueError(f"an index of class {type(index).__name__} cannot be restored")
        load_state(index, host["index"])
        ledger.hold(index.blocks)
    for seq in seqs.values():
        ledger.hold(seq.blocks)
    if not np.array_equal(ledger.refs, engine._device.state.cache.pool.refs):
        raise ValueError(f"{folder} is broken: its requests and index hold other blocks than its pool says")
    engine._runner.seqs.update(seqs)
    engine._scheduler.take_over([seqs[name] for name in host["running"]], [seqs[name] for name in host["waiting"]])
    engine._runner.news.waiting.extend(load_update(state) for state in host["news"])
    engine._next_id = host["next_id"]
    engine._runner.stats = engine._runner.stats._replace(**host["stats"])


def _arrays(engine: "Engine") -> tuple[Any, np.ndarray]:
    return engine._device.state, engine._memory.ledger.fill


def _set_arrays(engine: "Engine", numbered: Mapping[str, Array]) -> None:
    leaves, structure = jax.tree.flatten(_arrays(engine))
    restored = iter(_in_order(numbered))
    state, fill = jax.tree.unflatten(structure, [next(restored) if leaf.size else leaf for leaf in leaves])
    engine._device.state = state
    engine._memory.ledger.fill[:] = fill


def _numbered(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by their places: Orbax need not know its types. It takes no array without elements."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.size]
    return {f"{place:06}": leaf for place, leaf in enumerate(leaves)}


def _in_order(numbered: Mapping[str, Array]) -> list[Array]:
    return [numbered[name] for name in sorted(numbered)]


def _swapped_state(swapped: Swapped) -> dict[str, int]:
    return {"length": swapped.length, "blocks": jax.tree.leaves(swapped.layers)[0].shape[0]}


def _write_through(folder: Path) -> None:
    """Waits until the disk has all files and folders below a folder."""
    for path in [folder, *folder.rglob("*")]:
        _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
