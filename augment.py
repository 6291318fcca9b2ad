"""EDM's augmentation pipe (Karras 2022, appendix F.2): random moves and colours of a training image, told
to the net as labels so that they do not leak into samples (labels all 0 mean a clean image).

Drawn per image from a generator of its own (data.Loader), applied batched on the device (encoders.encode).
"""
import math
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F

from common import BadInput

# op: number of labels the net gets for it. Applied, and labels laid out, in this order.
known = dict(xflip=1, yflip=1, rotate_int=2, translate_int=2, scale=1, rotate_frac=2, aniso=2,
             translate_frac=2, brightness=1, contrast=1, lumaflip=1, hue=2, saturation=1)
edm = ("xflip", "yflip", "scale", "rotate_frac", "aniso", "translate_frac")  # its CIFAR-10 setting: 9 labels

# Low-pass of Daubechies' symlet with 6 vanishing moments, orthonormal to its even shifts; its centre of mass.
sym6 = (0.015404109327027373, 0.0034907120842174702, -0.11799011114819057, -0.048311742585633,
        0.4910559419267466, 0.787641141030194, 0.3379294217276218, -0.07263752278646252,
        -0.021060292512300564, 0.04472490177066578, 0.0017677118642428036, -0.007800708325034148)
delay = sum(k * h for k, h in enumerate(sym6)) / sum(sym6)


def chosen(cfg):
    """cfg["augment_ops"] in the pipe's own order; () = EDM's CIFAR-10 set."""
    given = cfg.get("augment_ops") or edm
    for op in given:
        if op not in known:
            raise BadInput(f"--augment_ops {op} is not one of {', '.join(known)}")
    return tuple(op for op in known if op in given)


def dim(cfg):
    """Number of augment labels the net gets; 0 where cfg["augment"] is 0."""
    return sum(known[op] for op in chosen(cfg)) if cfg.get("augment") else 0


def draw(rngs, p, ops):
    """One numpy generator per image -> (B, ops, 2) float32: what each op does, in apply()'s units; 0 =
    nothing.

    An op is on with probability p, but xflip always flips every second image, as in EDM and MeanFlow.
    """
    uniform = np.stack([rng.random((len(ops), 3)) for rng in rngs], 2)  # (ops, 3, B)
    normal = np.stack([rng.standard_normal((len(ops), 2)) for rng in rngs], 2)
    draws = np.zeros((len(rngs), len(ops), 2), np.float32)
    for k, op in enumerate(ops):
        gate, u, w = uniform[k]
        if op in ("xflip", "yflip", "lumaflip"):
            value = u < 0.5, 0
        elif op == "rotate_int":
            value = np.floor(4 * u), 0
        elif op == "translate_int":
            value = 2 * u - 1, 2 * w - 1
        elif op in ("rotate_frac", "hue"):
            value = math.pi * (2 * u - 1), 0
        elif op == "aniso":  # every second one along the image's own axes
            value = normal[k, 0], math.pi * (4 * w - 1) * (w < 0.5)
        elif op == "translate_frac":
            value = normal[k]
        else:
            value = normal[k, 0], 0
        on = (gate < p) | (op == "xflip")
        draws[:, k, 0], draws[:, k, 1] = on * value[0], on * value[1]
    return draws


def apply(x, draws, ops):
    """x (B, C, H, W) in [-1, 1], draws (B, ops, 2) on the CPU -> x (may leave [-1, 1]), labels (B, dim).

    Both on x's device. All-zero draws give x exactly and labels 0. Flips and integer moves copy pixels; the
    product of the others is sampled from the image at twice its size, up and down by the sym6 wavelet.
    Beyond its edges the image goes on mirrored. A matrix takes a place in the result (x to the right, y
    down, from the centre) to its source; colour matrices act on (red, green, blue, 1).
    """
    H, W = x.shape[2:]
    copy = warp = torch.eye(3, dtype=torch.float64)
    colour = unit = torch.eye(4, dtype=torch.float64)
    axis = torch.tensor([1, 1, 1, 0], dtype=torch.float64) / math.sqrt(3)
    grey = torch.outer(axis, axis)  # projection on the grey axis
    cross = torch.tensor([[0, -1, 1, 0], [1, 0, -1, 0], [-1, 1, 0, 0], [0, 0, 0, 0]]).double() / math.sqrt(3)
    labels = []
    for op, (a, b) in zip(ops, draws.double().permute(1, 2, 0)):  # a, b: (B,)
        label, one = [a], a[:, None, None]
        if op == "xflip":
            copy = copy @ scaling(1 - 2 * a, 1 + 0 * a)
        elif op == "yflip":
            copy = copy @ scaling(1 + 0 * a, 1 - 2 * a)
        elif op == "rotate_int":  # a quarter turns
            if H != W:
                raise BadInput(f"--augment_ops rotate_int needs square images, these are {W}x{H}")
            copy = copy @ turning(a * math.pi / 2)
            label = [(a == 1) | (a == 2), (a == 2) | (a == 3)]
        elif op == "translate_int":  # up to 1/8 of the image
            a, b = (a * W / 8).round(), (b * H / 8).round()
            copy = copy @ shifting(-a, -b)
            label = [a / (W / 8), b / (H / 8)]
        elif op == "scale":  # log2 of the factor has deviation 0.2, here and in aniso
            warp = warp @ scaling(2 ** (-0.2 * a), 2 ** (-0.2 * a))
        elif op == "rotate_frac":  # radians
            warp = warp @ turning(a)
            label = [a.cos() - 1, a.sin()]
        elif op == "aniso":  # stretched along the axis at angle b, shrunk across it
            warp = warp @ turning(-b) @ scaling(2 ** (-0.2 * a), 2 ** (0.2 * a)) @ turning(b)
            label = [a * b.cos(), a * b.sin()]
        elif op == "translate_frac":  # deviation 1/8 of the image
            warp = warp @ shifting(-a * W / 8, -b * H / 8)
            label = [a, b]
        elif op == "brightness":  # deviation 0.2
            colour = torch.cat([unit[:3] + 0.2 * one * unit[3], unit[3:].expand(len(a), 1, 4)], 1) @ colour
        elif op == "contrast":  # log2 of the factor has deviation 0.5
            colour = torch.diag_embed(torch.stack([2 ** (0.5 * a)] * 3 + [1 + 0 * a], 1)) @ colour
        elif op == "lumaflip":  # brightness turned over, hue kept
            colour = (unit - 2 * grey * one) @ colour
        elif op == "hue":  # radians about the grey axis (Rodrigues)
            colour = (unit + cross * one.sin() + cross @ cross * (1 - one.cos())) @ colour
            label = [a.cos() - 1, a.sin()]
        elif op == "saturation":  # log2 of the factor has deviation 1
            colour = (grey + (unit - grey) * 2 ** one) @ colour
        labels += label
    x = x.clone()
    for m, how in ((copy, copy_pixels), (warp, warp_pixels), (colour, recolour)):
        m = m.expand(len(x), -1, -1)
        rows = (m != torch.eye(m.shape[1], dtype=m.dtype)).flatten(1).any(1).nonzero().squeeze(1)
        if len(rows):
            there = rows.to(x.device)
            x[there] = how(x[there], m[rows].to(x))
    return x, torch.stack([v.float() for v in labels], 1).to(x.device)


def scaling(a, b):
    return torch.diag_embed(torch.stack([a, b, 1 + 0 * a], 1))  # (B, 3, 3)


def turning(angle):
    c, s, o = angle.cos(), angle.sin(), 0 * angle
    return torch.stack([c, -s, o, s, c, o, o, o, o + 1], 1).unflatten(1, (3, 3))


def shifting(a, b):
    o = 0 * a
    return torch.stack([o + 1, o, a, o, o + 1, b, o, o, o + 1], 1).unflatten(1, (3, 3))


def mirror(i, n):
    """Positions on an endless line -> those in [0, n - 1], reflected about the outer pixels' centres."""
    return n - 1 - abs(n - 1 - i % (2 * n - 2))


def sources(m, rows, columns, H, W):
    """Where the pixels at rows (h,), columns (w,) of the result come from -> rows, columns (n, h, w)."""
    y, x, m = rows[:, None] - (H - 1) / 2, columns - (W - 1) / 2, m[..., None, None]
    # sums, not a matrix product: TF32 would move pixels
    return (m[:, 1, 0] * x + m[:, 1, 1] * y + m[:, 1, 2] + (H - 1) / 2,
            m[:, 0, 0] * x + m[:, 0, 1] * y + m[:, 0, 2] + (W - 1) / 2)


def copy_pixels(x, m):
    H, W = x.shape[2:]
    rows, columns = sources(m, torch.arange(H, device=x.device), torch.arange(W, device=x.device), H, W)
    where = (mirror(rows.round(), H) * W + mirror(columns.round(), W)).long()  # (n, H, W)
    where = where.flatten(1)[:, None]
    return x.flatten(2).gather(2, where.expand(-1, x.shape[1], -1)).view_as(x)


@lru_cache(maxsize=8)
def filters(n):
    """-> margin; up (2 n + 4 margin + 10, n): mirror by margin, then double; down (n, 2 n + 10): halve."""
    margin = n // 2 + 8
    length = n + 2 * margin
    up, down = np.zeros((2 * length + 10, n), np.float32), np.zeros((n, 2 * n + 10), np.float32)
    for i in range(length):
        up[2 * i:2 * i + 12, mirror(i - margin, n)] += sym6
    for i in range(n):
        down[i, 2 * i:2 * i + 12] = sym6
    return margin, torch.from_numpy(up), torch.from_numpy(down)


def warp_pixels(x, m):
    H, W = x.shape[2:]
    filter_y, filter_x = filters(H), filters(W)
    fine = filter_y[1].to(x) @ x @ filter_x[1].to(x).T
    # pixel i lies at 2 i + delay of the finer grid
    places = [(torch.arange(2 * n + 10, device=x.device) - delay) / 2 for n in (H, W)]
    rows, columns = sources(m, *places, H, W)
    grid = []
    for s, n, margin in ((columns, W, filter_x[0]), (rows, H, filter_y[0])):
        edge = margin - 4  # where the filter still has all it reaches; what lies further out is mirrored back
        s = mirror(s + edge, n + 2 * edge) + margin - edge
        grid.append((4 * s + 2 * delay) / (2 * (n + 2 * margin) + 9) - 1)  # in [-1, 1]
    fine = F.grid_sample(fine, torch.stack(grid, 3).to(x), mode="bilinear", align_corners=True)
    return filter_y[2].to(x) @ fine @ filter_x[2].to(x).T


def recolour(x, m):
    m = m[:, :3]  # (n, 3, 4)
    if x.shape[1] == 1:  # grey: three equal channels, averaged afterwards
        m = torch.cat([m[:, :, :3].sum(2, keepdim=True), m[:, :, 3:]], 2).mean(1, keepdim=True)
    return (m[:, :, :-1, None, None] * x[:, None]).sum(2) + m[:, :, -1, None, None]
