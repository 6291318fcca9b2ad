"""DiT (Peebles 2022, arXiv 2212.09748) and SiT (Ma 2024, arXiv 2401.08740): class-conditional, on latents.

State-dict keys are those of the public files (DiT-XL-2-256x256.pt, SiT-XL-2-256x256.pt), which load as they
are. DiT predicts eps at 1000 t (its learned variance is dropped). SiT counts time from noise, t_sit = 1 - t,
and predicts x0 - eps; here as everywhere t = 0 is data, and both t and r are turned. The second time r comes
"abs", as it is, or "diff", as t - r (MeanFlow). Taps: outputs of the blocks.
"""
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from common import BadInput, heun, number
from nets.layers import (Linear, Net, Zero, attend, ddim, grid, maker, modulate, sin_emb,
                         sin_table)

shapes = dict(s=(12, 384, 6), b=(12, 768, 12), l=(24, 1024, 16), xl=(28, 1152, 16))         # depth, D, heads
dit = dict(x_shape=(4, 32, 32), label_dim=1000, schedule="dit", pred="eps", scale=1000.0, learn_sigma=True)
sit = dit | dict(schedule="rf", pred="flow", scale=1.0, reverse=True)
sizes = {f"{kind}_{name}2": base | dict(depth=depth, dim=dim, heads=heads)
         for kind, base in (("dit", dit), ("sit", sit)) for name, (depth, dim, heads) in shapes.items()}


def embedder(dim, last=Linear):
    """Of the sin_emb of a time that is already scaled: (B, 256) -> (B, dim)."""
    return nn.ModuleDict(dict(mlp=nn.Sequential(Linear(256, dim), nn.SiLU(), last(dim, dim))))


class Block(nn.Module):
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.attn = nn.ModuleDict(dict(qkv=Linear(dim, 3 * dim), proj=Linear(dim, dim)))
        self.mlp = nn.ModuleDict(dict(fc1=Linear(dim, 4 * dim), fc2=Linear(4 * dim, dim)))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), Zero(dim, 6 * dim))

    def forward(self, x, c):
        """x (B, S, D), c (B, D) -> (B, S, D)."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(c).chunk(6, dim=1)
        qkv = self.attn["qkv"](modulate(x, shift1, scale1))
        y = attend(*rearrange(qkv, "b s (three n d) -> three b n s d", three=3, n=self.heads))
        x = x + gate1[:, None] * self.attn["proj"](y)
        y = F.gelu(self.mlp["fc1"](modulate(x, shift2, scale2)), approximate="tanh")
        return x + gate2[:, None] * self.mlp["fc2"](F.dropout(y, self.dropout, self.training))


class DiT(Net):
    """scale: of t in its embedding; reverse: SiT's time and sign; r_kind: "abs" or "diff" (t - r);
    learn_sigma: twice the channels come out, the second half is not used."""
    layouts = dict(      # of sources: substitutions from this file's keys to theirs
        public=(("^layers", "blocks"),),
        fastgen=(("^layers", "blocks"), ("_embedder.mlp", "_embedder.proj_net"), ("embedding_table",
                 "class_embeddings"), (r"\.attn\.", ".attention."), (r"\.mlp\.fc", ".feed_forward.fc"),
                 ("final_layer.linear", "final_layer.projection"), ("final_layer.adaLN_modulation",
                 "final_layer.adaptive_params"), ("adaLN_modulation", "conditioning_net")))

    def __init__(self, x_shape, depth, dim, heads, patch=2, label_dim=0, schedule="dit", pred="eps",
                 scale=1000.0, reverse=False, learn_sigma=False, r=False, r_kind="abs", logvar=False,
                 dropout=0.0):
        super().__init__(x_shape, r, logvar)
        if dim % (4 * heads) or x_shape[1] % patch or r_kind not in ("abs", "diff"):
            raise BadInput(f"dit: dim {dim} must be a multiple of 4 x heads = {4 * heads}, the size "
                           f"{x_shape[1]} of patch {patch}, r_kind {r_kind!r} abs or diff")
        self.schedule, self.pred, self.label_dim = schedule, pred, label_dim
        self.patch, self.dim, self.scale, self.reverse, self.r_kind = patch, dim, scale, reverse, r_kind
        self.grid = x_shape[1] // patch, x_shape[2] // patch
        self.blocks, self.taps_at = [f"layers.{i}" for i in range(depth)], [(dim, *self.grid)] * depth

        self.x_embedder = nn.ModuleDict(dict(proj=nn.Conv2d(x_shape[0], dim, patch, stride=patch)))
        self.register_buffer("pos_embed", torch.empty(1, self.grid[0] * self.grid[1], dim))
        self.t_embedder = embedder(dim)                 # of labels: a row per class, the last for none
        self.y_embedder = nn.ModuleDict(dict(embedding_table=nn.Embedding(label_dim + 1, dim)))
        self.r_embedder = embedder(dim, Zero) if r else None
        self.logvar_linear = Zero(dim, 1) if logvar else None
        self.layers = nn.ModuleList(Block(dim, heads, dropout) for _ in range(depth))
        out = Zero(dim, patch ** 2 * x_shape[0] * (2 if learn_sigma else 1))
        self.final_layer = nn.ModuleDict(dict(
            linear=out, adaLN_modulation=nn.Sequential(nn.SiLU(), Zero(dim, 2 * dim))))
        self.reset_parameters()

    def reset_parameters(self):
        """The fixed table of positions: column in the first half, row in the second, each [sin, cos]."""
        rows, columns = grid(*self.grid, device="cpu")
        self.pos_embed.copy_(sin_table((columns, rows), [self.dim // 2] * 2)[None])

    def run(self, x, times, cond, tap):
        """cond: label (B,) int64, -1 = none."""
        if x.shape[2:] != self.x_shape[1:]:
            raise BadInput(f"dit: its positions are those of {self.x_shape}, not of {tuple(x.shape[1:])}")
        h = rearrange(self.x_embedder["proj"](x), "b d h w -> b (h w) d") + self.pos_embed
        at = [(1 - t if self.reverse else t) * self.scale for t in times]
        wave = lambda t: sin_emb(t, 256, self.dtype)                                            # noqa: E731
        e = self.t_embedder["mlp"](wave(at[0]))                                                 # (B, D)
        c = e + self.y_embedder["embedding_table"](self.labels(cond, times[0]))
        if len(at) > 1:
            c = c + self.r_embedder["mlp"](wave(at[1] if self.r_kind == "abs" else at[0] - at[1]))
        for i, layer in enumerate(self.layers):
            h = layer(h, c)
            if tap(i, rearrange(h, "b (h w) d -> b d h w", h=self.grid[0])):
                return None, e
        shift, scale = self.final_layer["adaLN_modulation"](c).chunk(2, dim=1)
        out = rearrange(self.final_layer["linear"](modulate(h, shift, scale)),
                        "b (h w) (p q c) -> b c (h p) (w q)", h=self.grid[0], p=self.patch, q=self.patch)
        out = out[:, :self.x_shape[0]]                  # without the learned variance
        return -out if self.reverse else out, e


make = maker(DiT, sizes)


def teacher_sample(net, noise, cond, steps, uncond=None, guidance=1.0):
    """x0 by DDIM over every (1000 // steps)-th time, as DiT's pipeline in diffusers; of SiT by Heun."""
    if net.schedule != "dit":
        return heun(net, noise, cond, steps, uncond, guidance)
    number("--steps", steps, 1, 1000)                   # the length of its table
    each = 1000 // steps
    return ddim(net, noise, cond, [k * each for k in reversed(range(steps))], each, uncond, guidance)
