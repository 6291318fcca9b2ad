"""FLUX.1-dev (Black Forest Labs 2024): text to image on 16-channel latents, 11.9 B parameters.

State-dict keys are those of the diffusers folder (FluxTransformer2DModel), which loads as it is. The net
predicts the flow eps - x0 at t in [0, 1]. It is distilled from guidance: the scale is an input, embedded like
the time; `embed_guidance` is given to every call whose cond has no "guidance" (B,). Image and text keep
streams of their own in the first blocks, then go through the rest as one sequence. Taps: the image tokens
after each block, double first.
"""
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from common import BadInput
from nets.layers import (JointAttention, Linear, Modulation, Net, SelfAttention, Zero, angles, dual_stream,
                         dynamic_mu, feed_forward, flow_euler, grid, maker, mlp2, modulate, pack, sigma_grid,
                         sin_emb, unpack)

sizes = dict(dev=dict(x_shape=(16, 128, 128), depth=19, single_depth=38, dim=3072, heads=24,
                      axes=(16, 56, 56), text_dim=4096, pooled_dim=768))


class Double(nn.Module):
    """Image x (B, S, D), text (B, L, D), e (B, D), angle (L + S, d / 2) -> both streams."""
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.norm1, self.norm1_context = Modulation(dim, 6), Modulation(dim, 6)
        self.attn = JointAttention(dim, heads)
        self.ff, self.ff_context = feed_forward(dim, dropout), feed_forward(dim, dropout)

    def forward(self, x, text, e, angle):
        mods = self.norm1(e), self.norm1_context(e)
        return dual_stream(x, text, mods, self.attn, (self.ff, self.ff_context), angle)


class Single(nn.Module):
    """Attention and MLP side by side on text and image in one sequence h (B, L + S, D)."""
    def __init__(self, dim, heads):
        super().__init__()
        self.norm, self.attn = Modulation(dim, 3), SelfAttention(dim, heads)
        self.proj_mlp, self.proj_out = Linear(dim, 4 * dim), Linear(5 * dim, dim)

    def forward(self, h, e, angle):
        shift, scale, gate = self.norm(e)
        y = modulate(h, shift, scale)
        y = torch.cat([self.attn(y, angle), F.gelu(self.proj_mlp(y), approximate="tanh")], dim=2)
        return h + gate[:, None] * self.proj_out(y)


class Flux(Net):
    """depth, single_depth: blocks of each kind; axes: channels of a head that (frame, row, column) turn;
    dropout: in the MLPs of the double blocks."""
    schedule, pred, exact = "rf", "flow", ("guidance",)

    def __init__(self, x_shape, depth, single_depth, dim, heads, axes, text_dim, pooled_dim,
                 embed_guidance=3.5, r=False, logvar=False, dropout=0.0):
        super().__init__(x_shape, r, logvar)
        if sum(axes) * heads != dim or any(n % 2 for n in axes):
            raise BadInput(f"flux: axes {axes} must be even, of sum dim / heads = {dim} / {heads}")
        self.axes, self.embed_guidance = tuple(axes), float(embed_guidance)
        self.text_dim, self.pooled_dim = text_dim, pooled_dim
        channels, rows, columns = x_shape
        self.blocks = [f"transformer_blocks.{i}" for i in range(depth)]
        self.blocks += [f"single_transformer_blocks.{i}" for i in range(single_depth)]
        self.taps_at = [(dim, rows // 2, columns // 2)] * len(self.blocks)

        self.time_text_embed = nn.ModuleDict(dict(
            timestep_embedder=mlp2(256, dim), guidance_embedder=mlp2(256, dim),
            text_embedder=mlp2(pooled_dim, dim)))
        self.context_embedder, self.x_embedder = Linear(text_dim, dim), Linear(4 * channels, dim)
        self.r_embedder = mlp2(256, dim, Zero) if r else None
        self.logvar_linear = Zero(dim, 1) if logvar else None
        self.transformer_blocks = nn.ModuleList(Double(dim, heads, dropout) for _ in range(depth))
        self.single_transformer_blocks = nn.ModuleList(Single(dim, heads) for _ in range(single_depth))
        self.norm_out, self.proj_out = Modulation(dim, 2), Zero(dim, 4 * channels)

    def run(self, x, times, cond, tap):
        """cond: text (B, L, text_dim), seen whole with its padding; pooled (B, pooled_dim); guidance (B,) or
        none. Any even H, W."""
        text, pooled = self.need(cond, text=self.text_dim, pooled=self.pooled_dim)
        rows, columns, length = x.shape[2] // 2, x.shape[3] // 2, text.shape[1]
        embed, wave = self.time_text_embed, lambda v: sin_emb(1000 * v, 256, self.dtype)        # noqa: E731
        guidance = cond.get("guidance", torch.full_like(times[0], self.embed_guidance))
        e_t = embed["timestep_embedder"](wave(times[0]))                                        # (B, D)
        e = e_t + embed["guidance_embedder"](wave(guidance)) + embed["text_embedder"](pooled)
        if len(times) > 1:
            e = e + self.r_embedder(wave(times[1]))
        places = grid(1, rows, columns, device=x.device)
        angle = angles([F.pad(p, (length, 0)) for p in places], self.axes)      # text stands at (0, 0, 0)
        image = lambda h: rearrange(h, "b (h w) d -> b d h w", h=rows)                          # noqa: E731

        x, text = self.x_embedder(pack(x)), self.context_embedder(text)
        for k, block in enumerate(self.transformer_blocks):
            x, text = block(x, text, e, angle)
            if tap(k, image(x)):
                return None, e_t
        h = torch.cat([text, x], dim=1)
        for k, block in enumerate(self.single_transformer_blocks, len(self.transformer_blocks)):
            h = block(h, e, angle)
            if tap(k, image(h[:, length:])):
                return None, e_t
        scale, shift = self.norm_out(e)                 # in this order, unlike in the blocks
        return unpack(self.proj_out(modulate(h[:, length:], shift, scale)), rows), e_t


make = maker(Flux, sizes)


def teacher_sample(net, noise, cond, steps, uncond=None, guidance=1.0):
    """As FluxPipeline: Euler on times shifted by the number of image tokens. The usual guidance is embedded;
    `guidance` above 1 with an `uncond` adds the classifier-free one (true_cfg_scale)."""
    height, width = noise(0).shape[2:]
    mu = dynamic_mu(height * width // 4, (256, 0.5), (4096, 1.15))
    return flow_euler(net, noise, cond, sigma_grid(steps, mu), uncond, guidance)
