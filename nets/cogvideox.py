"""CogVideoX 2B and 5B, version 1.0 (Yang 2024, arXiv 2408.06072): text to video on 16-channel latents.

State-dict keys are those of the diffusers folders (CogVideoXTransformer3DModel), which load as they are. The
net predicts v at 1000 t. Text and video go through every block in one attention, with one set of weights but
shifts, scales and gates of their own. 2B knows places from a fixed table added to the tokens, 5B from RoPE.
The reference has videos as (B, T, C, H, W); here they are (B, C, T, H, W) as everywhere. Taps: the video
tokens after each block, as pixels.
"""
import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from common import BadInput, number
from nets.layers import (Linear, Modulation, Net, SelfAttention, Zero, angles, ddim, feed_forward, grid,
                         maker, mlp2, modulate, pack, sin_emb, sin_table)

base = dict(x_shape=(16, 13, 60, 90), time_dim=512, text_dim=4096)
sizes = {"2b": base | dict(depth=30, dim=1920, heads=30, schedule="cogvideox2b"),
         "5b": base | dict(depth=42, dim=3072, heads=48, schedule="cogvideox", rotary=True)}


class Block(nn.Module):
    """Video x (B, S, D), text (B, L, D), e (B, time_dim), angle (L + S, d / 2) or None -> both streams."""
    def __init__(self, dim, heads, time_dim, dropout):
        super().__init__()
        self.norm1, self.norm2 = (Modulation(time_dim, 6, dim, norm=True) for _ in range(2))
        self.attn1, self.ff = SelfAttention(dim, heads, nn.LayerNorm, out=True), feed_forward(dim, dropout)

    def forward(self, x, text, e, angle):
        for norm, layer in ((self.norm1, lambda h: self.attn1(h, angle)), (self.norm2, self.ff)):
            shift, scale, gate, text_shift, text_scale, text_gate = norm(e)
            h = layer(torch.cat([modulate(text, text_shift, text_scale, norm.norm),
                                 modulate(x, shift, scale, norm.norm)], dim=1))
            y_text, y = h.split([text.shape[1], x.shape[1]], dim=1)
            x, text = x + gate[:, None] * y, text + text_gate[:, None] * y_text
        return x, text


class CogVideoX(Net):
    """time_dim: width of the embedded time; rotary: places by RoPE (5B), not by a table (2B)."""
    pred, takes = "v", ("skip",)

    def __init__(self, x_shape, depth, dim, heads, time_dim, text_dim, schedule="cogvideox", rotary=False,
                 r=False, logvar=False, dropout=0.0):
        super().__init__(x_shape, r, logvar)
        if dim % 16 or dim % (16 * heads) and rotary or dim % heads:
            raise BadInput(f"cogvideox: dim {dim} must be a multiple of heads {heads}, and of 16, which with "
                           "RoPE each head must be")
        self.schedule, self.rotary = schedule, rotary
        self.text_dim, self.dim, self.heads = text_dim, dim, heads
        channels, frames, rows, columns = x_shape
        self.blocks = [f"transformer_blocks.{i}" for i in range(depth)]
        self.taps_at = [(dim // 4, frames, rows, columns)] * depth

        self.patch_embed = nn.ModuleDict(dict(proj=nn.Conv2d(channels, dim, 2, stride=2),
                                              text_proj=Linear(text_dim, dim)))
        self.time_embedding = mlp2(dim, time_dim)
        self.r_embedder = mlp2(dim, time_dim, Zero) if r else None
        self.logvar_linear = Zero(time_dim, 1) if logvar else None
        self.transformer_blocks = nn.ModuleList(Block(dim, heads, time_dim, dropout) for _ in range(depth))
        self.norm_final = nn.LayerNorm(dim, eps=1e-5)
        self.norm_out = Modulation(time_dim, 2, dim, norm=True)
        self.proj_out = Zero(dim, 4 * channels)

    def table(self, frames, rows, columns, device):
        """What 2B adds to its tokens (T x h x w, D): [sin, cos] of time, then column, then row; the last two
        in units of 1.875 tokens."""
        count = lambda n, unit=1.0: torch.arange(n, dtype=torch.float64, device=device) / unit  # noqa: E731
        t, row, column = grid(count(frames), count(rows, 1.875), count(columns, 1.875))
        n = self.dim // 8
        return sin_table((t, column, row), (2 * n, 3 * n, 3 * n)).to(self.dtype)

    def angle(self, frames, rows, columns, device):
        """5B's RoPE angles (T x h x w, d / 2). Rows and columns of another shape than x_shape's are spread
        over the largest middle part of its grid that has their proportions."""
        sides, (base_rows, base_columns) = [], (n // 2 for n in self.x_shape[2:])
        if rows / columns > base_rows / base_columns:
            spans = base_rows, round(base_rows / rows * columns)
        else:
            spans = round(base_columns / columns * rows), base_columns
        for n, whole, span in zip((rows, columns), (base_rows, base_columns), spans):
            first = round((whole - span) / 2)
            last = (first + span) * (n - 1) / n         # not first + ...: as the reference has it
            sides.append(torch.linspace(first, last, n, dtype=torch.float64, device=device))
        n = self.dim // self.heads // 8
        return angles(grid(torch.arange(frames, device=device).double(), *sides), (2 * n, 3 * n, 3 * n))

    def run(self, x, times, cond, tap, skip):
        """cond: text (B, L, text_dim), seen whole with its padding. Any T, even H, W."""
        (text,) = self.need(cond, text=self.text_dim)
        size, angle = (x.shape[2], x.shape[3] // 2, x.shape[4] // 2, x.device), None
        video = lambda h: rearrange(h, "b (t h w) (c p q) -> b c t (h p) (w q)",                # noqa: E731
                                    t=size[0], h=size[1], p=2, q=2)
        wave, *wave_r = (sin_emb(1000 * t, self.dim, self.dtype) for t in times)
        e = e_t = self.time_embedding(wave)                                             # (B, time_dim)
        e = e + self.r_embedder(*wave_r) if wave_r else e

        proj, text = self.patch_embed["proj"], self.patch_embed["text_proj"](text)
        x = F.linear(pack(x), proj.weight.flatten(1), proj.bias)
        if self.rotary:                                 # text stands at 0, where nothing turns
            angle = F.pad(self.angle(*size), (0, 0, text.shape[1], 0))
        else:
            x = x + self.table(*size)
        for k, block in enumerate(self.transformer_blocks):
            if k not in skip:
                x, text = block(x, text, e, angle)
            if tap(k, video(x)):
                return None, e_t
        x = modulate(self.norm_final(x), *self.norm_out(e), self.norm_out.norm)
        return video(self.proj_out(x)), e_t


make = maker(CogVideoX, sizes)


def teacher_sample(net, noise, cond, steps, uncond=None, guidance=1.0):
    """As CogVideoXPipeline with the scheduler that the released folders name, CogVideoXDDIMScheduler: times
    999, ... in equal steps, counted from the noisy end."""
    number("--steps", steps, 1, 1000)                   # the length of its table
    # numpy, for its halves: at 48 steps they round otherwise without it; at 61 diffusers has a step too many
    ks = np.round(np.arange(1000, 0, -1000 / steps))[:steps] - 1
    return ddim(net, noise, cond, ks.astype(int).tolist(), 1000 // steps, uncond, guidance)
