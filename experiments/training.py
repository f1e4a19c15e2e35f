"""Trains a decoder with optax: a pure step on arrays, whose state is one flat dictionary that Orbax keeps."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

import jaxpage
from experiments.tasks import Batches, Task
from models import Decoder, Tokenizer

__all__ = ["State", "Trainer"]

State = dict[str, Array]
"""Parameters and the optimiser's moments, by number."""


class _Training(NamedTuple):
    params: nnx.State
    optimizer: optax.OptState


class Trainer:
    """Trains one decoder.

    Args:
      decoder: where training begins; its weights are changed by `load`.
      tokenizer: the decoder's.
      learning_rate: peak of the schedule, which warms up over the first twentieth of the steps and falls to nothing at the last.
      steps: steps of the whole training.
    """

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer, learning_rate: float, steps: int):
        self.decoder, self.tokenizer = decoder, tokenizer
        schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, max(1, steps // 20), steps)
        self._optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01))
        self._graph, params = nnx.split(decoder, nnx.Param)
        # Copies: `load` writes into what the decoder holds.
        self._first = jax.tree.map(jnp.copy, _Training(params, self._optimizer.init(params)))
        self._step = jax.jit(self._one_step, donate_argnums=0)
        self._batch_decoder = jaxpage.BatchDecoder(decoder, eos_ids=tokenizer.eos_ids, detokenize=tokenizer.decode)

    def first(self) -> State:
        """The state before the first step."""
        return _flat(jax.tree.map(jnp.copy, self._first))  # steps donate the state that they are given

    def train(self, state: State, batches: Batches, steps: range) -> tuple[State, float]:
        """Takes some steps; the state given is used up.

        Returns:
          (state, loss): the loss is the mean over the steps, in nats a token that counts.
        """
        training, losses = self._unflat(state), []
        for step in steps:
            batch = batches(step)
            training, loss = self._step(training, jnp.asarray(batch.tokens), jnp.asarray(batch.weights))
            losses.append(loss)
        return _flat(training), float(jnp.mean(jnp.stack(losses)))

    def load(self, state: State) -> Decoder:
        """The decoder with the weights of a state."""
        nnx.update(self.decoder, self._unflat(state).params)
        return self.decoder

    def exact(self, state: State, tasks: Sequence[Task]) -> float:
        """Percent of the tasks that the weights of a state answer exactly, decoded greedily through the paged cache."""
        self.load(state)
        longest = max(len(task.answer) for task in tasks)
        params = jaxpage.SamplingParams(max_tokens=longest + 2)
        updates = self._batch_decoder.run([self.tokenizer.encode(task.prompt) for task in tasks], params)
        done = [update.completion for update in updates if update.completion is not None]
        right = sum((each.text or "").strip() == tasks[each.index].answer for each in done)
        return 100 * right / len(tasks)

    def _one_step(
        self, training: _Training, tokens: Int[Array, "batch window+1"], weights: Float[Array, "batch window"]
    ) -> tuple[_Training, Float[Array, ""]]:
        def loss(params: nnx.State) -> Float[Array, ""]:
            logits = nnx.merge(self._graph, params)(tokens[:, :-1])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
            return jnp.sum(losses * weights) / jnp.sum(weights)

        value, gradients = jax.value_and_grad(loss)(training.params)
        updates, optimizer = self._optimizer.update(gradients, training.optimizer, training.params)
        return _Training(optax.apply_updates(training.params, updates), optimizer), value

    def _unflat(self, state: State) -> _Training:
        return jax.tree.unflatten(jax.tree.structure(self._first), [state[key] for key in sorted(state)])


def _flat(training: _Training) -> State:
    return {f"{place:05}": leaf for place, leaf in enumerate(jax.tree.leaves(training))}
