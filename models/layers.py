"""The layers of the decoder: linear, RMS norm, rotary embedding, gated feed-forward.

Weights are stored [out, in], as checkpoints hold them and as CPUs multiply them fastest.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

__all__ = ["Embedding", "FeedForward", "Linear", "RMSNorm", "apply_rope", "project", "rope_table"]

# XLA's CPU backend multiplies a handful of bfloat16 rows up to ten times slower than this many.
_MIN_BFLOAT16_ROWS = 8


def project(x: Float[Array, "*rows in"], weight: Float[Array, "out in"]) -> Float[Array, "*rows out"]:
    """x @ weight.T, accumulated in float32 and returned in float32."""
    rows = x.reshape(-1, x.shape[-1])
    short = _MIN_BFLOAT16_ROWS - rows.shape[0] if x.dtype == jnp.bfloat16 else 0
    if short > 0:
        rows = jnp.pad(rows, ((0, short), (0, 0)))
    out = lax.dot_general(rows, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return out[: out.shape[0] - max(short, 0)].reshape(*x.shape[:-1], -1)


class Linear(nnx.Module):
    """A projection with an optional bias. Its float32 output is rounded by whoever uses it, once, after the work on each element."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False, dtype: DTypeLike, rngs: nnx.Rngs):
        init = jax.nn.initializers.normal(0.02)
        self.weight = nnx.Param(init(rngs.params(), (out_features, in_features), dtype))
        self.bias = nnx.Param(jnp.zeros(out_features, dtype)) if bias else None

    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*rows out"]:
        """Projects the last axis."""
        out = project(x, self.weight[...])
        if self.bias is not None:
            out = out + jnp.broadcast_to(self.bias[...].astype(jnp.float32), out.shape)
        return out


class Embedding(nnx.Module):
    """The token table: rows on the way in, and logits on the way out where the output projection is tied."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.weight = nnx.Param(jax.nn.initializers.normal(0.02)(rngs.params(), (vocab_size, hidden_size), dtype))

    def __call__(self, tokens: Int[Array, "*rows"]) -> Float[Array, "*rows hidden"]:
        """Rows of the table."""
        return self.weight[...][tokens]

    def logits(self, x: Float[Array, "*rows hidden"]) -> Float[Array, "*rows vocab"]:
        """Scores of every token id, in float32."""
        return project(x, self.weight[...])


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, computed in float32 (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float, *, dtype: DTypeLike):
        self.weight = nnx.Param(jnp.ones(size, dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows size"]) -> Float[Array, "*rows size"]:
        """Norms the last axis."""
        wide = x.astype(jnp.float32)
        wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * jnp.broadcast_to(self.weight[...].astype(jnp.float32), x.shape)).astype(x.dtype)


class FeedForward(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), with gate and up in one projection (Shazeer, 2020)."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, dtype=dtype, rngs=rngs)
        self.down_proj = Linear(intermediate_size, hidden_size, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "*rows hidden"]) -> Float[Array, "*rows hidden"]:
        """Applies the layer to each row."""
        gate, up = jnp.split(self.gate_up_proj(x), 2, axis=-1)
        return self.down_proj((jax.nn.silu(gate) * up).astype(x.dtype))


def rope_table(
    positions: Int[Array, "*rows"], head_dim: int, theta: float, factors: tuple[float, ...] | None
) -> tuple[Float[Array, "*rows half"], Float[Array, "*rows half"]]:
    """Cosines and sines of the rotary angles of each position, in float32 (Su et al., 2021)."""
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if factors is not None:
        frequencies = frequencies / jnp.asarray(factors, jnp.float32)
    angles = jnp.einsum("...,f->...f", positions.astype(jnp.float32), frequencies, precision="highest")
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(
    x: Float[Array, "*rows heads dim"], cos: Float[Array, "*rows half"], sin: Float[Array, "*rows half"]
) -> Float[Array, "*rows heads dim"]:
    """Rotates each head's halves (x1, x2) by the angles: the layout of Hugging Face checkpoints."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
