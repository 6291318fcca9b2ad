"""EDM's augmentation pipe (Karras 2022, appendix F.2): random moves and colours of a training image, told
to the net as labels so that they do not leak into samples (labels all 0 mean a clean image).

Drawn per image from a generator of its own (data.Loader), applied batched on the device (encoders.encode).
"""
import math
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F

from common import known

edm = ("xflip", "yflip", "scale", "rotate_frac", "aniso", "translate_frac")  # its CIFAR-10 setting

# Low-pass of Daubechies' symlet with 6 vanishing moments, orthonormal to its even shifts; its centre of mass.
sym6 = (0.015404109327027373, 0.0034907120842174702, -0.11799011114819057, -0.048311742585633,
        0.4910559419267466, 0.787641141030194, 0.3379294217276218, -0.07263752278646252,
        -0.021060292512300564, 0.04472490177066578, 0.0017677118642428036, -0.007800708325034148)
delay = sum(k * h for k, h in enumerate(sym6)) / sum(sym6)


def matrix(*rows):
    """Rows of numbers and (B,) tensors -> (B, n, n)."""
    like = 0 * next(v for row in rows for v in row if torch.is_tensor(v))
    return torch.stack([torch.stack([v + like for v in row], 1) for row in rows], 1)


def stretching(a, b):  # by factors whose log2 has deviation 0.2
    return matrix([2 ** (-0.2 * a), 0, 0], [0, 2 ** (-0.2 * b), 0], [0, 0, 1])


def turning(angle):
    return matrix([angle.cos(), -angle.sin(), 0], [angle.sin(), angle.cos(), 0], [0, 0, 1])


unit = torch.eye(4, dtype=torch.float64)
axis = torch.tensor([1, 1, 1, 0], dtype=torch.float64) / math.sqrt(3)
grey = torch.outer(axis, axis)  # projection on the grey axis
cross = torch.tensor([[0, -1, 1, 0], [1, 0, -1, 0], [-1, 1, 0, 0], [0, 0, 0, 0]]).double() / math.sqrt(3)

# op: what draw() gave it, (B,) or for colours (B, 1, 1) -> matrix, and the net's labels for it. Applied, and
# labels laid out, in this order. A move takes a place in the result (x to the right, y down, from the centre)
# to its source; a colour acts on (red, green, blue, 1).
flips = dict(xflip=3, yflip=2)
moves = dict(
    scale=lambda a, b, W, H: (stretching(a, a), [a]),
    rotate_frac=lambda a, b, W, H: (turning(a), [a.cos() - 1, a.sin()]),
    # stretched along the axis at angle b, shrunk across it
    aniso=lambda a, b, W, H: (turning(-b) @ stretching(a, -a) @ turning(b), [a * b.cos(), a * b.sin()]),
    translate_frac=lambda a, b, W, H: (matrix([1, 0, -a * W / 8], [0, 1, -b * H / 8], [0, 0, 1]), [a, b]))
colours = dict(
    brightness=lambda a: (unit + 0.2 * a * torch.tensor([[0, 0, 0, 1]] * 3 + [[0] * 4]), [a]),
    contrast=lambda a: (unit * torch.cat([2 ** (0.5 * a)] * 3 + [a ** 0], 1), [a]),
    lumaflip=lambda a: (unit - 2 * grey * a, [a]),  # brightness turned over, hue kept
    # Rodrigues' formula about the grey axis
    hue=lambda a: (unit + cross * a.sin() + cross @ cross * (1 - a.cos()), [a.cos() - 1, a.sin()]),
    saturation=lambda a: (grey + (unit - grey) * 2 ** a, [a]))
labels = dict(xflip=1, yflip=1, scale=1, rotate_frac=2, aniso=2, translate_frac=2, brightness=1, contrast=1,
              lumaflip=1, hue=2, saturation=1)


def chosen(cfg):
    """cfg["augment_ops"] in the pipe's own order; () = EDM's CIFAR-10 set."""
    given = cfg.get("augment_ops") or edm
    for op in given:
        known("--augment_ops", op, labels)
    return tuple(op for op in labels if op in given)


def dim(cfg):
    """Number of augment labels the net gets; 0 where cfg["augment"] is 0."""
    return sum(labels[op] for op in chosen(cfg)) if cfg.get("augment") else 0


def draw(rngs, p, ops):
    """One numpy generator per image -> (B, ops, 2) float32: what each op does; 0 = nothing. An op is on with
    probability p, but xflip always flips every second image, as in EDM and MeanFlow."""
    uniform = np.stack([rng.random((len(ops), 3)) for rng in rngs], 2)  # (ops, 3, B)
    normal = np.stack([rng.standard_normal((len(ops), 2)) for rng in rngs], 2)
    draws = np.zeros((len(rngs), len(ops), 2), np.float32)
    for k, op in enumerate(ops):
        gate, u, w = uniform[k]
        a, b = normal[k, 0], 0
        if op in ("xflip", "yflip", "lumaflip"):
            a = u < 0.5
        elif op in ("rotate_frac", "hue"):
            a = math.pi * (2 * u - 1)
        elif op == "aniso":  # every second one along the image's own axes
            b = math.pi * (4 * w - 1) * (w < 0.5)
        elif op == "translate_frac":
            b = normal[k, 1]
        on = (gate < p) | (op == "xflip")
        draws[:, k, 0], draws[:, k, 1] = on * a, on * b
    return draws


def apply(x, draws, ops):
    """x (B, C, H, W) in [-1, 1], draws (B, ops, 2) on the CPU -> x (may leave [-1, 1]), labels (B, dim).

    Both on x's device. All-zero draws give x exactly and labels 0. The product of all moves is sampled from
    the image at twice its size, up and down by the sym6 wavelet. Beyond its edges the image goes on mirrored.
    """
    H, W = x.shape[2:]
    x, warp, colour, told = x.clone(), torch.eye(3, dtype=torch.float64), unit, []
    for op, (a, b) in zip(ops, draws.double().permute(1, 2, 0)):  # a, b: (B,)
        label = [a]
        if op in flips:
            there = a.nonzero()[:, 0].to(x.device)
            x[there] = x[there].flip(flips[op])
        elif op in moves:
            m, label = moves[op](a, b, W, H)
            warp = warp @ m
        else:
            m, label = colours[op](a[:, None, None])
            colour = m @ colour
        told += [v.flatten() for v in label]
    for m, how in (warp, warp_pixels), (colour, recolour):
        m = m.expand(len(x), -1, -1)
        rows = (m != torch.eye(m.shape[1], dtype=m.dtype)).flatten(1).any(1).nonzero().squeeze(1)
        if len(rows):
            there = rows.to(x.device)
            x[there] = how(x[there], m[rows].to(x))
    return x, torch.stack(told, 1).float().to(x.device)


def mirror(i, n):
    """Positions on an endless line -> those in [0, n - 1], reflected about the outer pixels' centres."""
    return n - 1 - abs(n - 1 - i % (2 * n - 2))


@lru_cache(maxsize=8)
def filters(n):
    """-> margin; up (2 n + 4 margin + 10, n): mirror by margin, then double; down (n, 2 n + 10): halve."""
    margin = n // 2 + 8
    up, down = np.zeros((2 * n + 4 * margin + 10, n), np.float32), np.zeros((n, 2 * n + 10), np.float32)
    for i in range(n + 2 * margin):
        up[2 * i:2 * i + 12, mirror(i - margin, n)] += sym6
    for i in range(n):
        down[i, 2 * i:2 * i + 12] = sym6
    return margin, torch.from_numpy(up), torch.from_numpy(down)


def warp_pixels(x, m):
    H, W = x.shape[2:]
    (margin_y, up_y, down_y), (margin_x, up_x, down_x) = filters(H), filters(W)
    # pixel i lies at 2 i + delay of the finer grid
    row, column = ((torch.arange(2 * n + 10, device=x.device) - delay) / 2 - (n - 1) / 2 for n in (H, W))
    m, row, grid = m[..., None, None], row[:, None], []
    # sums, not a matrix product, which TF32 would round
    for k, n, margin in (0, W, margin_x), (1, H, margin_y):
        s = m[:, k, 0] * column + m[:, k, 1] * row + m[:, k, 2] + (n - 1) / 2
        edge = margin - 4  # where the filter still has all it reaches; what lies further out is mirrored back
        s = mirror(s + edge, n + 2 * edge) + margin - edge
        grid.append((4 * s + 2 * delay) / (2 * (n + 2 * margin) + 9) - 1)  # in [-1, 1]
    fine = up_y.to(x) @ x @ up_x.to(x).T
    fine = F.grid_sample(fine, torch.stack(grid, 3).to(x), mode="bilinear", align_corners=True)
    return down_y.to(x) @ fine @ down_x.to(x).T


def recolour(x, m):
    m = m[:, :3]  # (n, 3, 4)
    if x.shape[1] == 1:  # grey: three equal channels, averaged afterwards
        m = torch.cat([m[:, :, :3].sum(2, keepdim=True), m[:, :, 3:]], 2).mean(1, keepdim=True)
    return (m[:, :, :-1, None, None] * x[:, None]).sum(2) + m[:, :, -1, None, None]
