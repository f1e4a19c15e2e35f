"""Saving and restoring a pytree of arrays with Orbax."""

from pathlib import Path

import jax
import orbax.checkpoint as ocp

__all__ = ["restore_arrays", "save_arrays"]


def save_arrays[Tree](folder: Path, tree: Tree) -> None:
    """Writes a pytree of arrays to a new folder, all of it or nothing: Orbax renames the folder into place at the end.

    Raises:
      ValueError: the folder exists.
    """
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.absolute(), tree)


def restore_arrays[Tree](folder: Path, like: Tree) -> Tree:
    """Reads a pytree that `save_arrays` wrote.

    Args:
      folder: where it was written.
      like: a pytree of arrays or `jax.ShapeDtypeStruct` of the same structure and shapes. Values are cast to its dtypes and placed by
        its shardings; without one they go to the default device.

    Raises:
      FileNotFoundError: there is no such folder.
      ValueError: it holds another structure or other shapes, or a file in it is missing or broken.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist: the checkpoint was not finished, or is not one")
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None) or here), like)
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(folder.absolute(), target)
    except (ValueError, OSError, KeyError) as error:  # Orbax explains at length; the first line says what it is
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{folder} cannot be restored: {reason}") from error
