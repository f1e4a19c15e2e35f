"""How query heads lie in the rows and lanes that meet the keys of a block.

A slot is a window of whole registers that holds the keys of one kv head, or of two heads of 64 lanes. Its rows are the query heads that
read those kv heads; each row is zero outside the lanes of its own head, so that one product scores them all. A decode step has few rows a
slot, so slots are joined to packs, side by side in the lanes, while their rows fit one register.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.tpu.format import LANES, Format

__all__ = ["Rows", "arrange", "pack_heads", "pack_queries", "unpack_heads", "unpack_outputs"]

_SUBLANES = 8
_MXU_DEPTH = 256  # lanes of one product on the newer generations


class Rows(NamedTuple):
    """The arrangement for one number of heads. Row of a token: pack * pack_rows + (slot in pack) * slot_rows + head in slot."""

    group: int  # query heads of a kv head
    slots: int
    slot_heads: int  # kv heads of a slot
    slot_lanes: int
    pack_slots: int

    @property
    def slot_rows(self) -> int:
        """Query heads of a slot."""
        return self.slot_heads * self.group

    @property
    def columns(self) -> int:
        """Registers of 128 lanes that a slot is wide."""
        return self.slot_lanes // LANES

    @property
    def packs(self) -> int:
        """Packs of a token."""
        return self.slots // self.pack_slots

    @property
    def pack_rows(self) -> int:
        """Rows of a pack, padded to whole registers."""
        return -(-self.pack_slots * self.slot_rows // _SUBLANES) * _SUBLANES

    @property
    def token_rows(self) -> int:
        """Rows of a token."""
        return self.packs * self.pack_rows


def arrange(form: Format, num_heads: int) -> Rows:
    """The arrangement of `num_heads` query heads over the keys of a format."""
    group = num_heads // form.num_kv_heads
    slot_heads = 2 if form.lanes < LANES and not form.interleaved else 1
    slots, slot_lanes = form.num_kv_heads // slot_heads, max(form.lanes, LANES)
    pack_slots = 1
    for size in range(2, slots + 1):
        if slots % size == 0 and size * slot_heads * group <= _SUBLANES and size * slot_lanes <= _MXU_DEPTH:
            pack_slots = size
    return Rows(group, slots, slot_heads, slot_lanes, pack_slots)


def pack_queries(q: Float[Array, "T H D"], rows: Rows, form: Format) -> Float[Array, "columns T*rows 128"]:
    """The rows of all tokens, in float32: 16-bit rows of different tokens share registers and could not be told apart by a copy."""
    num_tokens, _, head_dim = q.shape
    q = q.astype(jnp.float32).reshape(num_tokens, rows.slots, rows.slot_heads, rows.group, head_dim)
    q = jnp.pad(q, ((0, 0),) * 4 + ((0, form.lanes - head_dim),))
    own = jnp.eye(rows.slot_heads, rows.slot_lanes // form.lanes, dtype=jnp.float32)  # interleaved: the first half, over the keys
    q = q[..., None, :] * own[None, None, :, None, :, None]
    packed = _pad_rows(q.reshape(num_tokens, rows.slots, rows.slot_rows, rows.slot_lanes), rows)
    return jnp.swapaxes(packed.reshape(-1, rows.columns, LANES), 0, 1)


def pack_heads(per_head: Float[Array, " H"], rows: Rows) -> Float[Array, "rows 128"]:
    """One number a head, brought to its row and copied over the lanes."""
    return _pad_rows(jnp.broadcast_to(per_head.reshape(1, rows.slots, rows.slot_rows, 1), (1, rows.slots, rows.slot_rows, LANES)), rows)


def unpack_heads(per_row: Float[Array, "T*rows 128"], rows: Rows) -> Float[Array, "T H"]:
    """One number a head of each token from its row, where all lanes hold it."""
    per_row = per_row[:, 0].reshape(-1, rows.packs, rows.pack_rows)[:, :, : rows.pack_slots * rows.slot_rows]
    return per_row.reshape(-1, rows.slots * rows.slot_rows)


def unpack_outputs(out: Float[Array, "columns T*rows 128"], rows: Rows, form: Format) -> Float[Array, "T H D"]:
    """The heads of all tokens from their rows: of each row the lanes of its own head."""
    out = jnp.swapaxes(out, 0, 1).reshape(-1, rows.packs, rows.pack_rows, rows.slot_lanes)[:, :, : rows.pack_slots * rows.slot_rows]
    out = out.reshape(-1, rows.slots, rows.slot_heads, rows.group, rows.slot_lanes // form.lanes, form.lanes)
    if form.interleaved:
        out = out[..., 1:, :]  # values lie behind the keys
    elif rows.slot_heads > 1:
        heads = jnp.arange(rows.slot_heads)
        out = jnp.moveaxis(out[:, :, heads, :, heads], 0, 2)[..., None, :]
    return out.reshape(-1, rows.slots * rows.slot_rows, form.lanes)[..., : form.head_dim]


def _pad_rows(array: Float[Array, "T slots rows lanes"], rows: Rows) -> Float[Array, "T*rows lanes"]:
    num_tokens, lanes = array.shape[0], array.shape[-1]
    array = array.reshape(num_tokens, rows.packs, rows.pack_slots * rows.slot_rows, lanes)
    array = jnp.pad(array, ((0, 0), (0, 0), (0, rows.pack_rows - array.shape[2]), (0, 0)))
    return array.reshape(num_tokens * rows.token_rows, lanes)
