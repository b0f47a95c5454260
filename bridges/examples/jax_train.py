"""A transformer in JAX learns to copy, with FlashCore's attention and with JAX's own:

python jax_train.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from flashcore_attn.jax import flash_attn_func

WORDS, LENGTH, WIDTH, HEADS, KV_HEADS, STEPS = 16, 16, 64, 4, 2, 100


def parameters(key):
    """The weights of one layer, its embedding and its output."""
    kv = WIDTH * KV_HEADS // HEADS
    shapes = {"words": (WORDS, WIDTH), "places": (LENGTH, WIDTH), "q": (WIDTH, WIDTH), "k": (WIDTH, kv)}
    shapes |= {"v": (WIDTH, kv), "out": (WIDTH, WIDTH), "answer": (WIDTH, WORDS)}
    keys = jax.random.split(key, len(shapes))
    return {name: jax.random.normal(k, shape) / shape[0] ** 0.5 for k, (name, shape) in zip(keys, shapes.items())}


def loss(weights, words, attention):
    x = weights["words"][words] + weights["places"]
    heads = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
    q, k, v = ((x @ weights[name]).reshape(*words.shape, n, WIDTH // HEADS) for name, n in heads.items())
    x = x + attention(q, k, v).reshape(x.shape) @ weights["out"]
    told = jax.nn.log_softmax(x @ weights["answer"])
    # The second half repeats the first: each word is known from the one that is half a length before.
    asked = slice(LENGTH // 2 - 1, LENGTH - 1)
    return -jnp.take_along_axis(told[:, asked], words[:, LENGTH // 2 :, None], axis=-1).mean()


def train(attention):
    """The first and the last loss."""
    weights = parameters(jax.random.key(0))

    @jax.jit
    def step(weights, key):
        half = jax.random.randint(key, (32, LENGTH // 2), 0, WORDS)
        value, gradient = jax.value_and_grad(loss)(weights, jnp.concatenate([half, half], axis=1), attention)
        return jax.tree.map(lambda w, g: w - g, weights, gradient), value

    losses = []
    for key in jax.random.split(jax.random.key(1), STEPS):
        weights, value = step(weights, key)
        losses.append(float(value))
    return losses[0], losses[-1]


def main():
    ours = train(lambda q, k, v: flash_attn_func(q, k, v, causal=True))
    theirs = train(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True))
    print(f"loss with FlashCore {ours[0]:.4f} to {ours[1]:.4f}, with JAX {theirs[0]:.4f} to {theirs[1]:.4f}")
    if not all(abs(a - b) < 1e-2 for a, b in zip(ours, theirs)) or ours[1] > ours[0] / 2:
        raise SystemExit("the losses differ, or the model has not learnt")


if __name__ == "__main__":
    main()
