"""EDM networks: DDPM++ / NCSN++ (SongUNet) and ADM (DhariwalUNet) with EDM preconditioning.

Karras et al. 2022 (arXiv 2206.00364), table 1:  D(x_t, t) = c_skip x_t + c_out F(c_in x_t, ln(t) / 4),
x_t = x0 + t eps. State-dict keys are those of NVIDIA's public pickles (tools/convert_edm.py), which load as
they are. The embedding of r stands beside that of t (FastGen's layout). Tap k: the last encoder block of
level k.
"""
import functools
import math

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from common import wide
from nets.layers import Net, maker

sizes = dict(
    cifar10=dict(x_shape=(3, 32, 32), label_dim=10, augment_dim=9, width=128, mult=(2, 2, 2), blocks=4,
                 attn=(16,)),
    imagenet64=dict(x_shape=(3, 64, 64), label_dim=1000, adm=True, width=192, mult=(1, 2, 3, 4), blocks=3,
                    attn=(32, 16, 8)),
    # channels in multiples of 16: on an AVX-512 CPU faster than fewer parameters with 24 and 48 (measured)
    digits=dict(x_shape=(1, 8, 8), sigma_data=0.75, label_dim=10, width=16, mult=(2, 3), blocks=1, attn=(4,)),
)


# How weights start: (distribution, factor on weights, factor on biases), as published with Karras 2022.
SONG, SONG_ATTN, SONG_ZERO = ("xavier", 1, 0), ("xavier", math.sqrt(0.2), 0), ("xavier", 1e-5, 0)
ADM, ADM_ZERO = ("kaiming", math.sqrt(1 / 3), math.sqrt(1 / 3)), ("kaiming", 0, 0)


@torch.no_grad()
def draw(weight, bias, init):
    """Fill weight (out, in, ...) and bias (or None) from the default generator."""
    kind, weight_scale, bias_scale = init
    fan_in, fan_out = weight[0].numel(), weight[:, 0].numel()
    bound = math.sqrt(6 / (fan_in + fan_out)) if kind == "xavier" else math.sqrt(3 / fan_in)
    if kind == "normal":
        weight.normal_(0, weight_scale / math.sqrt(fan_in))
    else:
        weight.uniform_(-bound * weight_scale, bound * weight_scale)
    if bias is not None:
        bias.uniform_(-bound * bias_scale, bound * bias_scale)


class Linear(nn.Linear):
    def __init__(self, cin, cout, init, bias=True):
        self.init = init
        super().__init__(cin, cout, bias)

    def reset_parameters(self):
        draw(self.weight, self.bias, self.init)


class Conv(nn.Module):
    """k x k convolution (k = 0: none) after 2x up- or down-sampling with a separable filter. fused (down
    only, NCSN++'s skip path): the convolution comes first, padded for both."""
    def __init__(self, cin, cout, k, init, up=False, down=False, resample=(1, 1), fused=False):
        super().__init__()
        self.k, self.init, self.up, self.taps, self.fused = k, init, up, resample, fused
        self.weight = nn.Parameter(torch.empty(cout, cin, k, k)) if k else None
        self.bias = nn.Parameter(torch.empty(cout)) if k else None
        n = len(resample)
        self.register_buffer("resample_filter", torch.empty(1, 1, n, n) if up or down else None)
        self.reset_parameters()

    def reset_parameters(self):
        if self.k:
            draw(self.weight, self.bias, self.init)
        if self.resample_filter is not None:
            v = torch.tensor(self.taps, dtype=torch.float32, device="cpu")
            self.resample_filter.copy_(torch.outer(v, v) / v.sum() ** 2)

    def resample(self, x, pad):
        f = self.resample_filter.to(x.dtype).expand(x.shape[1], -1, -1, -1)
        conv, f = (F.conv_transpose2d, 4 * f) if self.up else (F.conv2d, f)
        return conv(x, f, stride=2, padding=pad, groups=x.shape[1])

    def forward(self, x):
        pad = (len(self.taps) - 1) // 2
        if self.fused:
            return self.resample(F.conv2d(x, self.weight, self.bias, padding=self.k // 2 + pad), 0)
        x = x if self.resample_filter is None else self.resample(x, pad)
        return F.conv2d(x, self.weight, self.bias, padding=self.k // 2) if self.k else x


class GroupNorm(nn.GroupNorm):
    def __init__(self, channels, eps):
        super().__init__(min(32, channels // 4), channels, eps)

    def forward(self, x):
        return F.group_norm(x, self.num_groups, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


def attend(qkv, heads, prepare=lambda x: x):
    """Self-attention over (B, 3 C, H, W), channels (head, channel, q/k/v), -> (B, C, H, W), with an explicit
    float32 softmax (fused kernels have no JVP); prepare acts on all three of (3, B, heads, C / heads, S)."""
    q, k, v = prepare(rearrange(qkv, "b (n c three) h w -> three b n c (h w)", three=3, n=heads))
    w = torch.einsum("bncq,bnck->bnqk", wide(q), wide(k) / math.sqrt(q.shape[2])).softmax(-1)
    x = torch.einsum("bnqk,bnck->bncq", w.to(v.dtype), v)
    return rearrange(x, "b n c (h w) -> b (n c) h w", h=qkv.shape[2])


class Block(nn.Module):
    """Residual block (B, cin, H, W) -> (B, cout, H', W') with the embedding (B, emb) and optional attention.
    song: the embedding is added, attention has one head, sums are scaled by sqrt(1/2);
    adm: the embedding scales and shifts, attention has cout // 64 heads (none below 64 channels)."""
    def __init__(self, cin, cout, emb, adm, dropout, attn=False, up=False, down=False, resample=(1, 1)):
        super().__init__()
        init, zero, eps = (ADM, ADM_ZERO, 1e-5) if adm else (SONG, SONG_ZERO, 1e-6)
        self.adm, self.dropout, self.scale = adm, dropout, 1 if adm else math.sqrt(0.5)
        self.heads, way = (cout // 64 if adm else 1) if attn else 0, dict(up=up, down=down, resample=resample)
        self.norm0, self.conv0 = GroupNorm(cin, eps), Conv(cin, cout, 3, init, **way)
        self.affine = Linear(emb, cout * (2 if adm else 1), init)
        self.norm1, self.conv1 = GroupNorm(cout, eps), Conv(cout, cout, 3, zero)
        kernel = 0 if adm and cin == cout else 1
        self.skip = Conv(cin, cout, kernel, init, **way) if cin != cout or up or down else None
        if self.heads:
            self.norm2 = GroupNorm(cout, eps)
            self.qkv = Conv(cout, 3 * cout, 1, init if adm else SONG_ATTN)
            self.proj = Conv(cout, cout, 1, zero)

    def forward(self, x, emb):
        h = self.conv0(F.silu(self.norm0(x)))
        a = self.affine(emb)[:, :, None, None].to(h.dtype)
        if self.adm:
            scale, shift = a.chunk(2, dim=1)
            h = self.norm1(h) * (scale + 1) + shift
        else:
            h = self.norm1(h + a)
        h = self.conv1(F.dropout(F.silu(h), self.dropout, self.training))
        x = (h + (x if self.skip is None else self.skip(x))) * self.scale
        return (x + self.proj(attend(self.qkv(self.norm2(x)), self.heads))) * self.scale if self.heads else x


class TimeEmbedding(nn.Module):
    """x (B,) -> [cos, sin](f x): (B, n), f falling from 1 to 1e-4 (reached with endpoint), or random."""
    def __init__(self, n, endpoint, fourier):
        super().__init__()
        self.n, self.endpoint = n // 2, endpoint
        self.register_buffer("freqs", torch.empty(n // 2) if fourier else None)
        if fourier:
            self.reset_parameters()

    def reset_parameters(self):
        self.freqs.normal_(0, 16)

    def forward(self, x):
        if self.freqs is not None:
            f = 2 * math.pi * self.freqs.to(x.dtype)
        else:
            f = 1e4 ** (-torch.arange(self.n, dtype=x.dtype, device=x.device) / (self.n - self.endpoint))
        x = x[:, None] * f
        return torch.cat([x.cos(), x.sin()], dim=1)


class Skeleton(nn.Module):
    """Encoder and decoder of a U-Net under the names of the public files, and the walk through them."""
    def build(self, x_shape, first, width, mult, blocks, attn, block, c, aux=None, last_attn=False):
        """first: from the input to c channels; block(encoder, cin, cout, res, attn=, up=, down=) makes one,
        aux(cin, cout) one of NCSN++'s skip path; last_attn: attention in the last block of a decoder's
        level alone."""
        (channels, size, _), skips = x_shape, []
        self.enc, self.dec, self.taps_at, self.tap_of = nn.ModuleDict(), nn.ModuleDict(), [], {}
        for level, m in enumerate(mult):
            res = size >> level
            self.enc[f"{res}x{res}_" + ("down" if level else "conv")] = (
                block(True, c, c, res, down=True) if level else first)
            if level and aux:
                self.enc[f"{res}x{res}_aux_residual"] = aux(channels, c)
                channels = c
            skips.append(c)
            for i in range(blocks):
                self.enc[f"{res}x{res}_block{i}"] = block(True, c, width * m, res, attn=res in attn)
                c = width * m
                skips.append(c)
            self.taps_at.append((c, res, res))
            self.tap_of[f"{res}x{res}_block{blocks - 1}"] = level
        self.dec[f"{res}x{res}_in0"] = block(False, c, c, res, attn=True)
        self.dec[f"{res}x{res}_in1"] = block(False, c, c, res)
        for level, m in reversed([*enumerate(mult)]):
            res = size >> level
            if level < len(mult) - 1:
                self.dec[f"{res}x{res}_up"] = block(False, c, c, res, up=True)
            for i in range(blocks + 1):
                here = res in attn and (not last_attn or i == blocks)
                self.dec[f"{res}x{res}_block{i}"] = block(False, c + skips.pop(), width * m, res, attn=here)
                c = width * m
        return c

    def join(self, x, skip):
        return torch.cat([x, skip], dim=1)

    def walk(self, x, emb, tap):
        """x (B, channels, H, W) and the embedding (B, emb) -> (B, c, H, W), or None if tap stops it."""
        skips, aux = [], x
        for key, block in self.enc.items():
            if key.endswith("aux_residual"):
                x = skips[-1] = aux = (x + block(aux)) * math.sqrt(0.5)
                continue
            x = block(x) if key.endswith("_conv") else block(x, emb)
            skips.append(x)
            if key in self.tap_of and tap(self.tap_of[key], x):
                return None
        for key, block in self.dec.items():
            if "_aux_" not in key:
                x = block(self.join(x, skips.pop()) if "_block" in key else x, emb)
        return x


class UNet(Skeleton):
    """F of the preconditioning: SongUNet, or DhariwalUNet with adm. width: channels at mult 1; mult: one per
    level; blocks: per level of the encoder, one more in the decoder; attn: resolutions with attention;
    emb_mult: the embedding's width over `width`. NCSN++ is fourier, residual, noise_mult=2 and
    resample=(1, 3, 3, 1)."""
    def __init__(self, x_shape, label_dim, augment_dim, r, logvar, width, mult, blocks, attn, adm=False,
                 emb_mult=4, noise_mult=1, fourier=False, residual=False, resample=(1, 1), dropout=0.0):
        super().__init__()
        (channels, size, _), init, emb = x_shape, ADM if adm else SONG, width * emb_mult
        c = width * mult[0] if adm else width
        self.adm, self.label_dim, self.noise = adm, label_dim, width * noise_mult
        total = self.noise * (2 if r else 1)
        self.map_noise = TimeEmbedding(self.noise, not adm, fourier)
        if label_dim:
            self.map_label = (Linear(label_dim, emb, ("normal", math.sqrt(label_dim), 0), bias=False) if adm
                              else Linear(label_dim, total, init))
        if augment_dim:
            self.map_augment = Linear(augment_dim, total, ADM_ZERO if adm else init, bias=False)
        self.map_layer0, self.map_layer1 = Linear(total, emb, init), Linear(emb, emb, init)
        if logvar:
            self.logvar_linear = Linear(self.noise, 1, ("xavier", 0, 0))     # starts as the plain loss, u = 0

        def block(encoder, cin, cout, res, attn=False, **way):
            return Block(cin, cout, emb, adm, dropout, attn, resample=resample if way else (1, 1), **way)

        aux = functools.partial(Conv, k=3, init=init, fused=True, down=True, resample=resample)
        c = self.build(x_shape, Conv(channels, c, 3, init), width, mult, blocks, attn, block, c,
                       aux if residual else None, last_attn=not adm)
        if adm:
            self.out_norm, self.out_conv = GroupNorm(c, 1e-5), Conv(c, channels, 3, ADM_ZERO)
        else:
            self.dec[f"{size}x{size}_aux_norm"] = GroupNorm(c, 1e-6)
            self.dec[f"{size}x{size}_aux_conv"] = Conv(c, channels, 3, SONG_ZERO)

    def forward(self, x, c_noise, label, augment, tap):
        """x in the weights' type, c_noise (B,) of t (and r), one-hot label (B, label_dim), augment
        (B, augment_dim) -> F (B, C, H, W) or None if stopped, the embedded time as such."""
        times = [self.map_noise(c) for c in c_noise]                # below: halves swapped to [sin, cos]
        e = torch.cat([e if self.adm else e.roll(self.noise // 2, 1) for e in times], dim=1).to(x.dtype)
        if augment is not None and hasattr(self, "map_augment"):
            e = e + self.map_augment(augment)
        if self.label_dim and not self.adm:
            e = e + self.map_label(label * math.sqrt(self.label_dim))
        e = self.map_layer1(F.silu(self.map_layer0(e)))
        h = self.walk(x, F.silu(e + self.map_label(label) if self.label_dim and self.adm else e), tap)
        if h is not None:
            norm, conv = (self.out_norm, self.out_conv) if self.adm else list(self.dec.values())[-2:]
            h = conv(F.silu(norm(h)))
        return h, times[0].to(x.dtype)


class Preconditioned(Net):
    """x0 prediction D of x_t = x0 + t eps around a family's F. cond: label (B,) int64, -1 = none (range
    checked on the CPU only), and what the family names."""
    schedule, pred, transformer = "edm", "x0", False

    def __init__(self, x_shape, label_dim, sigma_data, r, logvar):
        super().__init__(x_shape, r, logvar)
        self.label_dim, self.sigma_data = label_dim, sigma_data

    def coefficients(self, t):
        s, var = self.sigma_data, t ** 2 + self.sigma_data ** 2
        return var.rsqrt(), s ** 2 / var, t * s * var.rsqrt()

    def embeddable(self, times, cond):
        """c_noise (B,) of each time, in at least float32; one-hot label (B, label_dim), none: a zero row."""
        dtype = torch.promote_types(torch.float32, self.dtype)
        c_noise = [(t.clamp(min=1e-6).log() / 4).to(dtype) for t in times]
        classes = torch.arange(self.label_dim, device=times[0].device)
        return c_noise, (self.labels(cond, times[0])[:, None] == classes).to(self.dtype)


class EDM(Preconditioned):
    """r: takes a second time; logvar: has the log-variance head. cond: also augment (B, augment_dim)."""
    optional, logvar_at = ("model.logvar_linear.",), "model.logvar_linear"

    def __init__(self, x_shape, label_dim=0, augment_dim=0, sigma_data=0.5, r=False, logvar=False, **unet):
        super().__init__(x_shape, label_dim, sigma_data, r, logvar)
        self.augment_dim = augment_dim
        self.model = UNet(x_shape, label_dim, augment_dim, r=r, logvar=logvar, **unet)
        self.taps_at = self.model.taps_at
        self.blocks = [name for name, m in self.named_modules() if isinstance(m, Block)]

    def run(self, x, times, cond, tap):
        return self.model(x, *self.embeddable(times, cond), cond.get("augment"), tap)

    def adapt(self, key, tensor):
        """A source's tensor in this net's shape: zero weights for r, None for a part built off here."""
        part, model = key.removeprefix("model.").split(".")[0], self.model
        if part in ("map_augment", "logvar_linear") and not hasattr(model, part):
            return None
        dim = dict(map_layer0=1, map_augment=0, map_label=None if model.adm else 0).get(part)
        if not self.built["r"] or dim is None or tensor.ndim <= dim or tensor.shape[dim] != model.noise:
            return tensor
        return torch.cat([tensor, torch.zeros_like(tensor)], dim=dim)


make = maker(EDM, sizes)
