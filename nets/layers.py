"""What the networks of the public models share: the checked call, time embeddings, attention, positions."""
import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from common import BadInput


class Net(nn.Module):
    """The call of design.md §4 around a family's own `run`, with everything about it checked.

    A family sets schedule, pred, x_shape, blocks and taps_at, the shapes (C, H, W) of its taps, has `dtype`
    (that of its weights, read from a parameter of the root) and

        run(x (B, C, H, W), times, cond, tap) -> (prediction like x, None if stopped; embedding of t (B, D))

    x and cond's tensors, but for those in `exact`, come in the weights' type, times = (t,) or (t, r) float64
    (B,), as given. After the k-th tapped block it calls tap(k, feature (B, C, H, W)) and stops where that
    returns True. Heads that a net may lack (r_embedder, logvar_linear) are None then; sources may lack or
    have them.
    """
    optional = ("r_embedder.", "logvar_linear.")
    exact = ()                           # keys of cond that keep their own type
    label_dim = 0
    layouts = dict(public=())            # of sources: substitutions (pattern, theirs) from our keys to theirs

    def __init__(self):
        super().__init__()
        self.r_embedder = self.logvar_linear = None

    @property
    def n_taps(self):
        return len(self.taps_at)

    @property
    def head_kind(self):
        """The kind of discriminator head: a transformer's features are all of one size, a U-Net's shrink."""
        return "image_dit" if len({shape[1:] for shape in self.taps_at}) == 1 else "unet"

    def tap_shapes(self, taps):
        """Shapes (C, H, W) at x_shape of the features that a call with these taps returns, ascending."""
        if bad := [k for k in taps if k not in range(self.n_taps)]:
            raise BadInput(f"tap {bad[0]} does not exist in this net; its taps are 0 to {self.n_taps - 1}")
        return [self.taps_at[k] for k in sorted(set(taps))]

    def adapt(self, key, tensor):
        """A source's tensor for this net; None for a head built off here."""
        part = key.split(".")[0]
        return None if part + "." in self.optional and getattr(self, part) is None else tensor

    def forward(self, x_t, t, cond={}, r=None, taps=(), stop=False, logvar=False, skip=(), start=0,
                cache=None, write=False):
        """x_t (B, C, H, W), t and r (B,) -> the prediction in at least float32, or a dict of out, taps,
        logvar (B,). What cond may hold is said by the family; the rest of it is ignored."""
        if skip or start or cache is not None or write:
            raise BadInput("an image net has no skip, start, cache or write; leave them out")
        heads = dict(r=(r is not None, self.r_embedder), logvar=(logvar, self.logvar_linear))
        for name, (asked, head) in heads.items():
            if asked and head is None:
                raise BadInput(f"{name} was asked of a net built without it; build the net with {name}=True")
        if r is None and self.r_embedder is not None:
            raise BadInput("this net was built with r=True and needs r in every call")
        if x_t.shape[1] != self.x_shape[0] or x_t.ndim != len(self.x_shape) + 1:
            raise BadInput(f"x_t of shape {tuple(x_t.shape)} for a net of {self.x_shape}")
        shapes, features = self.tap_shapes(taps), []

        def tap(k, feature):
            if k in taps:
                features.append(feature)
            return stop and len(features) == len(shapes)

        cast = lambda v: v.to(self.dtype) if v.is_floating_point() else v                       # noqa: E731
        times = (t,) if r is None else (t, r)
        cond = {k: v if k in self.exact else cast(v) for k, v in cond.items()}
        out, e = self.run(cast(x_t), times, cond, tap)
        wide = torch.promote_types(torch.float32, x_t.dtype)
        result = {} if out is None else dict(out=out.to(wide))
        if taps:
            result["taps"] = features
        if logvar:
            result["logvar"] = self.logvar_linear(e)[:, 0].to(wide)
        return result if taps or logvar else result["out"]

    def labels(self, cond, t):
        """Class indices (B,) of cond, -1 (none) as label_dim, which is the null class."""
        label = cond.get("label", torch.full_like(t, -1, dtype=torch.int64))
        if label.device.type == "cpu" and (label >= self.label_dim).any() and self.label_dim:
            raise BadInput(f"label {int(label.max())} is not below the net's label_dim {self.label_dim}")
        return torch.where(label < 0, self.label_dim, label) if self.label_dim else torch.zeros_like(label)


class Linear(nn.Linear):
    """Starts by Xavier, biases at 0, as transformers of this kind do."""
    def reset_parameters(self):
        nn.init.xavier_uniform_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Zero(nn.Linear):
    """Starts at 0: what it adds changes nothing until it is trained."""
    def reset_parameters(self):
        nn.init.zeros_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


def sin_emb(t, n, dtype):
    """[cos, sin](t f), f falling from 1 towards 1e-4: (B,) -> (B, n) in `dtype`, from at least float32."""
    t = t.to(torch.promote_types(torch.float32, dtype))
    # in the references' order of operations: another one moves an angle of 1000 by 1e-4 in float32
    f = torch.exp(-math.log(1e4) * torch.arange(n // 2, dtype=t.dtype, device=t.device) / (n // 2))
    angle = t[:, None] * f
    return torch.cat([angle.cos(), angle.sin()], dim=1).to(dtype)


def rope(x, angle):
    """Rotates neighbouring channels of x (B, heads, S, d) by angle (S, d / 2) in at least float32."""
    a, b = x.to(torch.promote_types(torch.float32, x.dtype)).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angle.cos().to(a.dtype), angle.sin().to(a.dtype)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).to(x.dtype)


def angles(positions, axes, theta=1e4):
    """RoPE angles, float64 (S, sum(axes) / 2), of positions (S,) along each axis, axes[i] channels for it."""
    parts = []
    for p, n in zip(positions, axes):
        j = torch.arange(0, n, 2, dtype=torch.float64, device=p.device)
        parts.append(p.double()[:, None] * theta ** (-j / n))
    return torch.cat(parts, dim=1)


def attention(q, k, v, mask=None):
    """softmax(q k' / sqrt(d)) v over (B, heads, S, d); mask (broadcast to (B, heads, S, K)): True = seen, or
    a number to add. Fused kernels have no forward-mode derivative, so torch.func.jvp gets the plain one."""
    with sdpa_kernel(SDPBackend.MATH) if forward_ad._current_level >= 0 else nullcontext():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def modulate(x, shift, scale, eps=1e-6):
    """LayerNorm without parameters, then scale and shift (B, D) for each token of x (B, S, D)."""
    return F.layer_norm(x, x.shape[-1:], eps=eps) * (1 + scale[:, None]) + shift[:, None]
