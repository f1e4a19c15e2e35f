"""How keys and values of one block lie in the lanes and sublanes of a TPU.

Heads are brought to whole registers of 128 lanes. A head of up to 64 lanes shares them with another: with the next kv head where the
number of heads is even, else keys and values of one head share them. Wider heads are padded to a multiple of 128.

Most blocks are stored as [C, B, 128]: C columns of 128 lanes, all columns of the keys, then all of the values. A block of 16-bit values
that is too small to fill a tile of its own is stored as 32-bit words instead, [B * W, 128]: the low half of a word is a key, the high half
the value of the same head and lane.

A block with fewer tokens than share the 32 bits of a lane would be padded to them by the hardware, and XLA would copy the whole pool to
do so. Such blocks are stored in float32 from the start (`widened`), which holds every narrower value exactly.

8-bit values are stored as bytes. Their scales, one for each token and head, fill one more column: the low bytes of the bfloat16 scales of
all key heads, then of all value heads, from lane 0 on, their high bytes from lane 64 on.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num

__all__ = ["DTYPES", "LANES", "Format", "TpuStorage", "pack", "unpack"]

DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn")
LANES = 128
_TILE = 8  # sublanes of a register


class Format(NamedTuple):
    """What is stored, and so how. `scaled`: 8-bit values carry a scale for each token and head."""

    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    scaled: bool = False

    @property
    def lanes(self) -> int:
        """Lanes a head is padded to."""
        return 64 if self.head_dim <= 64 else -(-self.head_dim // LANES) * LANES

    @property
    def interleaved(self) -> bool:
        """Whether the keys and the values of one head share a register."""
        return self.lanes < LANES and self.num_kv_heads % 2 == 1

    @property
    def words(self) -> bool:
        """Whether a key and its value are the halves of a 32-bit word."""
        narrow = jnp.dtype(self.dtype).itemsize == 2 and self.block_size < _TILE
        return narrow and self.num_kv_heads * self.lanes % (LANES * _TILE) == 0

    @property
    def key_columns(self) -> int:
        """Registers of 128 lanes that the keys of one token fill."""
        return self.num_kv_heads if self.interleaved else self.num_kv_heads * self.lanes // LANES

    @property
    def columns(self) -> int:
        """Registers that one token fills: keys, values and scales."""
        return self.key_columns * (1 if self.interleaved or self.words else 2) + self.scaled

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Physical shape of one block."""
        if self.words:
            return (self.block_size * self.key_columns, LANES)
        return (self.columns, self.block_size, LANES)

    @property
    def narrow(self) -> bool:
        """Whether values are of 8 bits."""
        return jnp.dtype(self.dtype).itemsize == 1

    @property
    def widened(self) -> bool:
        """Whether values are stored in more bits than they have."""
        return not self.words and self.block_size < 4 // jnp.dtype(self.dtype).itemsize

    @property
    def storage_dtype(self) -> jnp.dtype:
        """Dtype of the physical array."""
        if self.words:
            return jnp.dtype(jnp.uint32)
        if self.widened:
            return jnp.dtype(jnp.float32)
        return jnp.dtype(jnp.int8 if self.narrow else self.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TpuStorage:
    """One layer's blocks. Keys and values of a block lie in one array, so that one copy fetches them.

    The physical shape does not tell heads from lanes, so the format is kept beside it, as static data of the pytree.
    """

    blocks: Num[Array, "N ..."]
    form: Format = dataclasses.field(metadata={"static": True})


def pack(keys: Float[Array, "N B K D"], values: Float[Array, "N B K D"], form: Format) -> Num[Array, "N ..."]:
    """Physical blocks from logical ones, for any number of tokens a block."""
    num_blocks, block_size = keys.shape[:2]
    (keys, key_scales), (values, value_scales) = (_encode(side, form) for side in (keys, values))
    pad = ((0, 0), (0, 0), (0, 0), (0, form.lanes - form.head_dim))
    keys, values = jnp.pad(keys, pad), jnp.pad(values, pad)
    if form.words:
        low, high = (lax.bitcast_convert_type(side, jnp.uint16).astype(jnp.uint32) for side in (keys, values))
        return (low | (high << 16)).reshape(num_blocks, -1, LANES)
    if form.interleaved:
        rows = jnp.concatenate([keys, values], axis=-1)
    else:
        rows = jnp.concatenate([keys.reshape(num_blocks, block_size, -1), values.reshape(num_blocks, block_size, -1)], axis=-1)
    rows = rows.reshape(num_blocks, block_size, -1, LANES)
    if form.scaled:
        scales = jnp.concatenate([key_scales, value_scales], axis=-1)
        scales = lax.bitcast_convert_type(scales, jnp.int8).astype(rows.dtype)  # [N, B, 2K, bytes]
        scales = jnp.pad(scales, ((0, 0), (0, 0), (0, LANES // 2 - scales.shape[2]), (0, 0)))
        rows = jnp.concatenate([rows, jnp.swapaxes(scales, 2, 3).reshape(num_blocks, block_size, 1, LANES)], axis=2)
    return jnp.swapaxes(rows, 1, 2)


def unpack(blocks: Num[Array, "N ..."], form: Format) -> tuple[Float[Array, "N B K D"], Float[Array, "N B K D"]]:
    """Logical keys and values of physical blocks, 8-bit ones in float32."""
    num_blocks = blocks.shape[0]
    shape = (num_blocks, form.block_size, form.num_kv_heads, form.lanes)
    if form.words:
        halves = (blocks & 0xFFFF, blocks >> 16)
        sides = [lax.bitcast_convert_type(half.astype(jnp.uint16), jnp.dtype(form.dtype)).reshape(shape) for half in halves]
        return sides[0][..., : form.head_dim], sides[1][..., : form.head_dim]
    rows = jnp.swapaxes(blocks, 1, 2)
    scales = None
    if form.scaled:
        rows, scales = rows[:, :, :-1], jnp.swapaxes(rows[:, :, -1].reshape(num_blocks, form.block_size, 2, LANES // 2), 2, 3)
        scales = lax.bitcast_convert_type(scales.astype(jnp.int8), jnp.bfloat16).astype(jnp.float32)[..., None]
    if form.interleaved:
        both = rows.reshape(*shape[:-1], 2, form.lanes)
        sides = [both[..., 0, :], both[..., 1, :]]
    else:
        sides = [side.reshape(shape) for side in (rows[:, :, : form.key_columns], rows[:, :, form.key_columns :])]
    sides = [_decode(side[..., : form.head_dim], form) for side in sides]
    if scales is not None:
        sides = [sides[0] * scales[:, :, : form.num_kv_heads], sides[1] * scales[:, :, form.num_kv_heads : 2 * form.num_kv_heads]]
    return sides[0], sides[1]


def _encode(side: Float[Array, "N B K D"], form: Format) -> tuple[Num[Array, "N B K D"], Float[Array, "N B K"]]:
    """What is stored for some values, and their scales: ones where none are kept."""
    scales = jnp.ones(side.shape[:-1], jnp.bfloat16)
    if not form.narrow:
        return side.astype(form.dtype).astype(jnp.float32 if form.widened else form.dtype), scales
    largest = 127.0 if form.dtype == "int8" else float(jnp.finfo(form.dtype).max)
    side = side.astype(jnp.float32)
    if form.scaled:
        # Rounded up to bfloat16, so that the largest value does not overflow; a token of zeros needs a scale too.
        scales = jnp.max(jnp.abs(side), axis=-1) * ((1 + 2**-7) / largest)
        scales = jnp.maximum(scales, 1e-30).astype(jnp.bfloat16)
        side = side / scales.astype(jnp.float32)[..., None]
    side = jnp.clip(side, -largest, largest)
    codes = jnp.round(side).astype(jnp.int8) if form.dtype == "int8" else side.astype(form.dtype)
    return codes.astype(jnp.float32) if form.widened else lax.bitcast_convert_type(codes, jnp.int8), scales


def _decode(side: Num[Array, "N B K D"], form: Format) -> Float[Array, "N B K D"]:
    if not form.narrow:
        return side.astype(form.dtype)
    if form.dtype != "int8" and not form.widened:
        side = lax.bitcast_convert_type(side, jnp.dtype(form.dtype))
    return side.astype(jnp.float32)
