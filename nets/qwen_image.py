"""Qwen-Image (Qwen team 2025, arXiv 2508.02324): text to image on 16-channel latents, 20.4 B parameters.

State-dict keys are those of the diffusers folder (QwenImageTransformer2DModel), which loads as it is. The net
predicts the flow eps - x0 at t in [0, 1]; text and image keep streams of their own in every block. Rows and
columns count from the middle of the image, text from its edge on. Taps: the image tokens after each block.
"""
import torch
from einops import rearrange
from torch import nn

from common import BadInput
from nets.layers import (JointAttention, Linear, Modulation, Net, Zero, angles, dual_stream, dynamic_mu,
                         feed_forward, flow_euler, grid, maker, mlp2, modulate, pack, sigma_grid, sin_emb,
                         unpack)

sizes = dict(base=dict(x_shape=(16, 128, 128), depth=60, dim=3072, heads=24, axes=(16, 56, 56),
                       text_dim=3584))


class Block(nn.Module):
    """Image x (B, S, D), text (B, L, D), e (B, D), angle (L + S, d / 2), mask (B, 1, 1, L + S) -> streams."""
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.img_mod, self.txt_mod = (nn.Sequential(nn.SiLU(), Zero(dim, 6 * dim)) for _ in range(2))
        self.attn = JointAttention(dim, heads)
        self.img_mlp, self.txt_mlp = feed_forward(dim, dropout), feed_forward(dim, dropout)

    def forward(self, x, text, e, angle, mask):
        mods = self.img_mod(e).chunk(6, dim=1), self.txt_mod(e).chunk(6, dim=1)
        return dual_stream(x, text, mods, self.attn, (self.img_mlp, self.txt_mlp), angle, mask)


class QwenImage(Net):
    """axes: channels of a head that (frame, row, column) turn."""
    schedule, pred = "rf", "flow"

    def __init__(self, x_shape, depth, dim, heads, axes, text_dim, r=False, logvar=False, dropout=0.0):
        super().__init__(x_shape, r, logvar)
        if sum(axes) * heads != dim or any(n % 2 for n in axes):
            raise BadInput(f"qwen_image: axes {axes} must be even, of sum dim / heads = {dim} / {heads}")
        self.axes, self.text_dim = tuple(axes), text_dim
        channels, rows, columns = x_shape
        self.blocks = [f"transformer_blocks.{i}" for i in range(depth)]
        self.taps_at = [(dim, rows // 2, columns // 2)] * depth

        self.time_text_embed = nn.ModuleDict(dict(timestep_embedder=mlp2(256, dim)))
        self.txt_norm = nn.RMSNorm(text_dim, eps=1e-6)
        self.img_in, self.txt_in = Linear(4 * channels, dim), Linear(text_dim, dim)
        self.r_embedder = mlp2(256, dim, Zero) if r else None
        self.logvar_linear = Zero(dim, 1) if logvar else None
        self.transformer_blocks = nn.ModuleList(Block(dim, heads, dropout) for _ in range(depth))
        self.norm_out, self.proj_out = Modulation(dim, 2), Zero(dim, 4 * channels)

    def run(self, x, times, cond, tap):
        """cond: text (B, L, text_dim); text_mask (B, L), 1 = seen, none = all seen. Any even H, W."""
        (text,) = self.need(cond, text=self.text_dim)
        (batch, length), rows, columns = text.shape[:2], x.shape[2] // 2, x.shape[3] // 2
        wave, *wave_r = (sin_emb(t, 256, self.dtype, 1000) for t in times)    # scaled last, as there
        e = e_t = self.time_text_embed["timestep_embedder"](wave)                               # (B, D)
        e = e + self.r_embedder(*wave_r) if wave_r else e
        count = lambda n, start=0: torch.arange(start, start + n, device=x.device)              # noqa: E731
        image = grid(count(1), count(rows, rows // 2 - rows), count(columns, columns // 2 - columns))
        words = count(length, max(rows // 2, columns // 2))             # the same place on all three axes
        angle, mask = angles([torch.cat([words, p]) for p in image], self.axes), None
        if "text_mask" in cond:
            mask = torch.cat([cond["text_mask"] > 0.5, text.new_ones(batch, rows * columns) > 0], dim=1)
            mask = mask[:, None, None]                  # (B, 1, 1, L + S), over keys

        x, text = self.img_in(pack(x)), self.txt_in(self.txt_norm(text))
        for k, block in enumerate(self.transformer_blocks):
            x, text = block(x, text, e, angle, mask)
            if tap(k, rearrange(x, "b (h w) d -> b d h w", h=rows)):
                return None, e_t
        scale, shift = self.norm_out(e)                 # in this order, unlike in the blocks
        return unpack(self.proj_out(modulate(x, shift, scale)), rows), e_t


make = maker(QwenImage, sizes)


def keep_norm(guided, cond):
    """The guided flow (B, C, H, W) with the norm that the conditional one has in each token."""
    norm = lambda v: pack(v).norm(dim=2, keepdim=True)                                          # noqa: E731
    ratio = norm(cond) / norm(guided).clamp(min=1e-12)
    return unpack(pack(guided) * ratio, guided.shape[2] // 2)


def teacher_sample(net, noise, cond, steps, uncond=None, guidance=1.0):
    """As QwenImagePipeline: Euler on times shifted by the number of image tokens and ending at 0.02;
    guidance above 1 with an `uncond` keeps the norm of the conditional flow."""
    height, width = noise(0).shape[2:]
    mu = dynamic_mu(height * width // 4, (256, 0.5), (8192, 0.9))
    return flow_euler(net, noise, cond, sigma_grid(steps, mu, 0.02), uncond, guidance, keep_norm)
