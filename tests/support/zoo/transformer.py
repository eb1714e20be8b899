"""A pre-norm causal transformer with packed qkv and tied embeddings; and either library's own attention."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch import nn

from support.zoo import losses
from unified_ddp.equivalence import JaxSide, Pair, TorchSide

VOCABULARY, WIDTH, HEADS, LENGTH = 24, 16, 2, 6


class TorchBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = nn.Module()
        self.attn.qkv, self.attn.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.attn.qkv(self.ln_1(x)).chunk(3, dim=-1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class TorchTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.wpe = nn.Parameter(torch.randn(1, LENGTH, WIDTH))
        self.blocks = nn.ModuleList(TorchBlock() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class JaxBlock(nnx.Module):
    def __init__(self, rngs, *, eps, scale, approximate, swap_qk, causal, heads_first) -> None:
        norm = lambda: nnx.LayerNorm(WIDTH, epsilon=eps, use_fast_variance=False, rngs=rngs)  # noqa: E731
        self.ln_1, self.ln_2 = norm(), norm()
        self.qkv, self.proj = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs), nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.scale, self.approximate, self.swap_qk = scale, approximate, swap_qk
        self.causal, self.heads_first = causal, heads_first

    def __call__(self, x):
        parts = jnp.split(self.qkv(self.ln_1(x)), 3, axis=-1)
        shape = (*x.shape[:2], HEADS, -1)
        if self.heads_first:
            q, k, v = (part.reshape(shape) for part in parts)
        else:
            q, k, v = (part.reshape(*x.shape[:2], -1, HEADS).swapaxes(2, 3) for part in parts)
        if self.swap_qk:
            q, k = k, q
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * self.scale
        if self.causal:
            scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)
        x = x + self.proj(mixed.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.ln_2(x)), approximate=self.approximate))


class JaxTransformer(nnx.Module):
    def __init__(
        self,
        rngs,
        *,
        eps=1e-5,
        scale=(WIDTH // HEADS) ** -0.5,
        approximate=False,
        swap_qk=False,
        causal=True,
        heads_first=True,
        embedding_scale=1.0,
        stop_head=False,
    ) -> None:
        options = {
            "eps": eps,
            "scale": scale,
            "approximate": approximate,
            "swap_qk": swap_qk,
            "causal": causal,
            "heads_first": heads_first,
        }
        self.wte = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.wpe = nnx.Param(jnp.zeros((LENGTH, WIDTH)))
        self.layers = nnx.List([JaxBlock(rngs, **options) for _ in range(2)])
        self.norm = nnx.LayerNorm(WIDTH, epsilon=eps, use_fast_variance=False, rngs=rngs)
        self.embedding_scale, self.stop_head = embedding_scale, stop_head

    def __call__(self, tokens):
        x = self.wte(tokens) * self.embedding_scale + self.wpe[...]
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        if self.stop_head:
            return x @ jax.lax.stop_gradient(self.wte.embedding[...]).T
        return self.wte.attend(x)


def batches(count=1, size=4):
    random = np.random.default_rng(2)
    draw = lambda: random.integers(0, VOCABULARY, (size, LENGTH))  # noqa: E731
    return [{"x": draw(), "y": draw()} for _ in range(count)]


def pair(loss=losses.jax_classify, torch_optimizer=None, jax_optimizer=None, rules=None, **options) -> Pair:
    torch.manual_seed(0)
    return Pair(
        TorchSide(TorchTransformer(), losses.torch_classify, torch_optimizer),
        JaxSide(JaxTransformer(nnx.Rngs(0), **options), loss, jax_optimizer),
        batches(),
        rules=rules,
    )


class TorchAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = self.embed(x)
        return self.head(x + self.attn(x, x, x, need_weights=False)[0])


class JaxAttention(nnx.Module):
    def __init__(self, rngs) -> None:
        self.embed = nnx.Linear(5, WIDTH, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 3, rngs=rngs)

    def __call__(self, x):
        x = self.embed(x)
        return self.head(x + self.attn(x))


def attention_pair() -> Pair:
    torch.manual_seed(0)
    random = np.random.default_rng(3)
    batch = {
        "x": random.normal(size=(4, LENGTH, 5)).astype(np.float32),
        "y": random.normal(size=(4, LENGTH, 3)).astype(np.float32),
    }
    return Pair(
        TorchSide(TorchAttention(), losses.torch_regress),
        JaxSide(JaxAttention(nnx.Rngs(0)), losses.jax_regress),
        [batch],
    )
