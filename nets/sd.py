"""UNets of Stable Diffusion 1.5 (Rombach 2022, arXiv 2112.10752) and XL (Podell 2023, arXiv 2307.01952).

State-dict keys are those of the public files (unet/diffusion_pytorch_model.safetensors of
stable-diffusion-v1-5/stable-diffusion-v1-5 and stabilityai/stable-diffusion-xl-base-1.0), which load as they
are. Text to image on latents, eps at 1000 t. Levels of resnets, each with a transformer after it that reads
the text, halve the map; the way up takes back what each step of the way down left. Taps: outputs of the down
blocks, then of the middle.
"""
import functools

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from common import BadInput, alpha_sigma, convert, number, predict, t_like, wide
from nets.layers import Net, Zero, attend, maker, mlp2, sin_emb, split

sizes = dict(                            # depths: transformer layers of each level, 0 = no attention there
    sd15=dict(x_shape=(4, 64, 64), schedule="sd", mult=(1, 2, 4, 4), depths=(1, 1, 1, 0), heads=(8, 8, 8, 8),
              text_dim=768),
    sdxl=dict(x_shape=(4, 128, 128), schedule="sdxl", mult=(1, 2, 4), depths=(0, 2, 10), heads=(5, 10, 20),
              text_dim=2048, pooled_dim=1280, linear=True))


class Resnet(nn.Module):
    def __init__(self, size, out, emb, groups, dropout):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(groups, size), nn.Conv2d(size, out, 3, padding=1)
        self.time_emb_proj = nn.Linear(emb, out)
        self.norm2, self.conv2 = nn.GroupNorm(groups, out), nn.Conv2d(out, out, 3, padding=1)
        self.conv_shortcut = nn.Conv2d(size, out, 1) if size != out else None
        self.dropout = dropout

    def forward(self, x, emb):
        """x (B, size, H, W), emb (B, E) -> (B, out, H, W)."""
        h = self.conv1(F.silu(self.norm1(x))) + self.time_emb_proj(F.silu(emb))[:, :, None, None]
        h = self.conv2(F.dropout(F.silu(self.norm2(h)), self.dropout, self.training))
        return h + (x if self.conv_shortcut is None else self.conv_shortcut(x))


class Attention(nn.Module):
    def __init__(self, dim, heads, context):
        super().__init__()
        self.heads, self.to_q = heads, nn.Linear(dim, dim, bias=False)
        self.to_k, self.to_v = (nn.Linear(context, dim, bias=False) for _ in range(2))
        self.to_out = nn.ModuleList([nn.Linear(dim, dim)])

    def forward(self, x, context, bias=None):
        """x (B, S, D), context (B, L, C), bias (B, 1, 1, L) on the scores -> (B, S, D)."""
        streams = split(self.heads, self.to_q(x), self.to_k(context), self.to_v(context))
        return self.to_out[0](attend(*streams, mask=bias))


class Layer(nn.Module):
    """Attention within the image, to the text, and an MLP: (B, S, D) -> (B, S, D)."""
    def __init__(self, dim, heads, text_dim):
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(dim) for _ in range(3))
        self.attn1, self.attn2 = Attention(dim, heads, dim), Attention(dim, heads, text_dim)
        widen = nn.ModuleDict(dict(proj=nn.Linear(dim, 8 * dim)))
        self.ff = nn.ModuleDict(dict(net=nn.ModuleList([widen, nn.Identity(), nn.Linear(4 * dim, dim)])))

    def forward(self, x, text, bias):
        h = self.norm1(x)
        x = x + self.attn1(h, h)
        x = x + self.attn2(self.norm2(x), text, bias)
        widen, _, last = self.ff["net"]
        y, gate = widen["proj"](self.norm3(x)).chunk(2, dim=-1)
        return x + last(y * F.gelu(gate))               # the exact one, not tanh's


class Transformer(nn.Module):
    """Layers over the pixels of a map; projections into and out of them: SDXL's linear, SD 1.5's 1x1 conv."""
    def __init__(self, dim, heads, text_dim, depth, groups, linear):
        super().__init__()
        project = nn.Linear if linear else functools.partial(nn.Conv2d, kernel_size=1)
        self.linear, self.norm, self.proj_in = linear, nn.GroupNorm(groups, dim, eps=1e-6), project(dim, dim)
        self.transformer_blocks = nn.ModuleList(Layer(dim, heads, text_dim) for _ in range(depth))
        self.proj_out = project(dim, dim)

    def forward(self, x, text, bias):
        """x (B, D, H, W) -> the same shape."""
        tokens = lambda h: rearrange(h, "b d h w -> b (h w) d")                                  # noqa: E731
        image = lambda h: rearrange(h, "b (h w) d -> b d h w", h=x.shape[2])                     # noqa: E731
        h = self.norm(x)
        h = self.proj_in(tokens(h)) if self.linear else tokens(self.proj_in(h))
        for layer in self.transformer_blocks:
            h = layer(h, text, bias)
        return x + (image(self.proj_out(h)) if self.linear else self.proj_out(image(h)))


class Block(nn.Module):
    """A level on the way down or up, or the middle: resnets (channels in, out), with a transformer after each
    (after `attentions` of them) where depth is not 0. sampler, by its name in the files: "downsamplers" halve
    the map (odd sizes up), "upsamplers" keep it after it was taken to another size."""
    def __init__(self, resnets, depth, heads, text_dim, emb, groups, linear, dropout, attentions=None,
                 sampler=""):
        super().__init__()
        self.resnets = nn.ModuleList(Resnet(*pair, emb, groups, dropout) for pair in resnets)
        if depth:
            self.attentions = nn.ModuleList(Transformer(dim, heads, text_dim, depth, groups, linear)
                                            for _, dim in resnets[:attentions])
        if sampler:
            dim, stride = resnets[-1][1], 2 if sampler == "downsamplers" else 1
            conv = nn.Conv2d(dim, dim, 3, stride=stride, padding=1)
            self.add_module(sampler, nn.ModuleList([nn.ModuleDict(dict(conv=conv))]))
        self.sampler = sampler

    def forward(self, h, emb, text, bias, skips=(), size=None):
        """-> the maps after each layer and after the sampler; the last goes on. skips: maps that the layers
        take in besides h, the first one's last; size (H, W): what is enlarged to before the sampler."""
        attentions, maps = getattr(self, "attentions", ()), []
        for j, resnet in enumerate(self.resnets):
            h = resnet(torch.cat([h, skips[-1 - j]], dim=1) if skips else h, emb)
            if j < len(attentions):
                h = attentions[j](h, text, bias)
            maps.append(h)
        if self.sampler:
            h = h if size is None else F.interpolate(h, size=size, mode="nearest")
            maps.append(getattr(self, self.sampler)[0]["conv"](h))
        return tuple(maps)


class UNet(Net):
    """Level i has width x mult[i] channels, `layers` resnets (one more on the way up) and heads[i] heads.
    pooled_dim: SDXL's second embedding, of pooled text and six numbers in id_dim channels each; 0 = none."""
    transformer, exact = False, ("time_ids",)           # 1023 is not a bfloat16

    def __init__(self, x_shape, schedule, mult, depths, heads, text_dim, width=320, layers=2, groups=32,
                 pooled_dim=0, id_dim=256, linear=False, pred="eps", r=False, logvar=False, dropout=0.0):
        super().__init__(x_shape, r, logvar)
        dims, top, emb = [width * m for m in mult], len(mult) - 1, 4 * width
        if not len(dims) == len(depths) == len(heads) or any(d % n for d, n in zip(dims, heads)):
            raise BadInput(f"sd: mult {mult}, depths {depths}, heads {heads} must be of one length and each "
                           f"width x mult = {dims} a multiple of its heads")
        self.schedule, self.pred, self.width = schedule, pred, width
        self.text_dim, self.pooled_dim, self.id_dim = text_dim, pooled_dim, id_dim
        down, up = ([f"{way}_blocks.{i}" for i in range(len(dims))] for way in ("down", "up"))
        self.blocks = [*down, "mid_block", *up]
        self.taps_at = [(dims[min(i, top)], *(-(-size // 2 ** min(i + 1, top)) for size in x_shape[1:]))
                        for i in range(len(dims) + 1)]  # every level but the last halves, odd sizes up

        self.conv_in = nn.Conv2d(x_shape[0], width, 3, padding=1)
        self.time_embedding = mlp2(width, emb)
        if pooled_dim:
            self.add_embedding = mlp2(pooled_dim + 6 * id_dim, emb)
        self.r_embedder = mlp2(width, emb, Zero) if r else None
        self.logvar_linear = Zero(emb, 1) if logvar else None
        block = functools.partial(Block, text_dim=text_dim, emb=emb, groups=groups, linear=linear,
                                  dropout=dropout)
        self.down_blocks, self.up_blocks = nn.ModuleList(), nn.ModuleList()
        left = [width]                                  # channels of what the way down leaves for the way up
        for i, dim in enumerate(dims):
            pairs = [(left[-1], dim)] + [(dim, dim)] * (layers - 1)
            self.down_blocks.append(block(pairs, depths[i], heads[i], sampler="downsamplers" * (i < top)))
            left += [dim] * (layers + (i < top))
        self.mid_block = block([(dims[-1], dims[-1])] * 2, max(1, depths[-1]), heads[-1], attentions=1)
        for i, dim in reversed([*enumerate(dims)]):
            below = dims[min(i + 1, top)]
            pairs = [(size + left.pop(), dim) for size in [below] + [dim] * layers]
            self.up_blocks.append(block(pairs, depths[i], heads[i], sampler="upsamplers" * (i > 0)))
        self.conv_norm_out = nn.GroupNorm(groups, width)
        self.conv_out = nn.Conv2d(width, x_shape[0], 3, padding=1)

    def run(self, x, times, cond, tap):
        """cond: text (B, L, text_dim); text_mask (B, L), 0 = a token that is not seen (the public pipelines
        give none); with pooled_dim also pooled (B, pooled_dim) and time_ids (B, 6), in pixels: height and
        width of the original, top and left of its crop, height and width asked for; none = as the public
        pipeline has them, both sizes those of x, at the VAE's 8 pixels a row, uncropped."""
        pooled = dict(pooled=self.pooled_dim) if self.pooled_dim else {}
        text, *pooled = self.need(cond, text=self.text_dim, **pooled)
        bias = None
        if "text_mask" in cond:
            bias = -1e4 * (1 - cond["text_mask"].to(text.dtype))[:, None, None]                 # (B, 1, 1, L)
        wave, *wave_r = (sin_emb(1000 * t, self.width, self.dtype) for t in times)
        e = emb = self.time_embedding(wave)                                                      # (B, E)
        if self.pooled_dim:
            height, width = (8.0 * n for n in x.shape[2:])
            size = torch.tensor([[height, width, 0, 0, height, width]], device=x.device).expand(len(x), 6)
            ids = sin_emb(cond.get("time_ids", size), self.id_dim, self.dtype).flatten(1)
            emb = emb + self.add_embedding(torch.cat([*pooled, ids], dim=1))
        emb = emb + self.r_embedder(*wave_r) if wave_r else emb

        h = self.conv_in(x)
        left = [h]
        for i, block in enumerate(self.down_blocks):
            left += block(h, emb, text, bias)
            h = left[-1]
            if tap(i, h):
                return None, e
        h = self.mid_block(h, emb, text, bias)[-1]
        if tap(len(self.down_blocks), h):
            return None, e
        for block in self.up_blocks:
            n = len(block.resnets)
            left, skips = left[:-n], tuple(left[-n:])
            h = block(h, emb, text, bias, skips, tuple(left[-1].shape[2:]) if left else None)[-1]
        return self.conv_out(F.silu(self.conv_norm_out(h))), e


make = maker(UNet, sizes)

# Adams-Bashforth: what the last predictions, the newest last, count for in a step, in order of their number
multistep = {1: (1,), 2: (-1 / 2, 3 / 2), 3: (5 / 12, -16 / 12, 23 / 12),
             4: (-9 / 24, 37 / 24, -59 / 24, 55 / 24)}


def teacher_sample(net, noise, cond, steps, uncond=None, guidance=1.0):
    """Latents of the public pipelines from z = noise(0), calls at the table's entries 1 + k (1000 // steps).
    "sd": PNDM (Liu 2022, arXiv 2202.09778) without its Runge-Kutta start: linear multistep, the first step
    twice, so steps + 1 calls; ends at the table's first entry. "sdxl": Euler on sigma / alpha, to x0."""
    number("--steps", steps, 1, 999)
    stride, pndm, x, past = 1000 // steps, net.schedule == "sd", wide(noise(0)), []
    time = lambda i: t_like(i / 1000, x)                                                         # noqa: E731
    call = lambda x, i: predict(net, x, time(i), cond, net.pred, uncond, guidance)               # noqa: E731

    def step(x, out, i, j):
        """DDIM from entry i to j with the prediction `out` at i; below 1 is the end."""
        eps = convert(net.schedule, x, out, time(i), net.pred, "eps")
        at = torch.tensor([i, max(j, 0)], dtype=torch.float64, device="cpu") / 1000
        (a, a_next), (b, b_next) = (c.tolist() for c in alpha_sigma(net.schedule, at))
        a_next, b_next = (a_next, b_next) if j > 0 or pndm else (1, 0)
        return a_next / a * x + (b_next - a_next * b / a) * eps

    for k in reversed(range(steps)):
        i = 1 + k * stride
        out = call(x, i)
        past = [*past[-3:], out] if pndm else [out]
        if pndm and len(past) == 1 < steps:
            out = (out + call(step(x, out, i, i - stride), i - stride)) / 2
        else:
            out = sum(c * p for c, p in zip(multistep[len(past)], past))
        x = step(x, out, i, i - stride)
    return x
