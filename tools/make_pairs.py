"""Make the pairs that methods/kd.py trains on: noise, states on the teacher's ODE, the sample it ends at.

    torchrun --nproc_per_node 2 tools/make_pairs.py --out outputs/pairs/digits      the digits' teacher
    torchrun --nproc_per_node 8 tools/make_pairs.py --net edm:cifar10 --data cifar10-32x32.zip --teacher
        edm-cifar10-32x32-cond-vp.pth --pairs 1024000 --path_t 80 --out outputs/pairs/cifar10

Labels are the data's, shuffled by the seed, and the noise of pair i is a function of (seed, i), none that
sample.py or evaluate.py draw. The ODE starts from sigma z at the first time of --path_t; the others
are taken into the solver's grid. A causal net (--net FAMILY:SIZE,chunk=2) makes the pairs of
methods/causal_kd.py: each chunk of a clip after the data's clean chunks before it. Texts are those of the
tars that tools/encode.py made, and are read there again in training. FOLDER (or a URL) gets

    meta.json      what made them: teacher's checksum, schedule, solver, steps, guidance, times, seed, labels
    0000000.npy    --shard pairs, float32 (pairs, times + 1, C, [F,] H, W): x_t at each time, so the noise is
                   scaled by sigma, and x0 last (causal: what the ODE ends at as t = 0, and last the data's
                   clip). Any number of ranks writes the same files.

Given again it makes what is missing. A folder that was made otherwise is refused.
"""
import argparse
import fcntl
import json
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ckpt, common, data, files, sample, train, trainer  # noqa: E401, E402
from nets import encoders  # noqa: E402

ORDERS = dict(heun=2, euler=1)


@torch.no_grad()
def solve(net, meta, ids, device, clips=None, texts={}):
    """Pairs `ids`, float32 (len(ids), times + 1, C, [F,] H, W): the states at the times of the path, then x0.
    clips (len(ids), C, F, H, W): the data's, of which a causal net sees the chunks before its own. texts: as
    encoders.conditions takes them."""
    labels = [meta["labels"][i] if meta["labels"] else -1 for i in ids]
    cond, uncond = encoders.conditions(labels, meta, device, texts)
    z = common.noise_fn(common.hash_seed("pairs", meta["seed"]), ids, meta["shape"], device)(0)
    z = z.to(common.t_like(0, z))                       # float64, as EDM's sampler keeps its state
    guidance, at = meta["guidance"], [t for t in meta["path_t"] if t]
    args = cond, meta["steps"], uncond, guidance, at, ORDERS[meta["solver"]]
    if clips is None:
        x0, states = common.heun(net, lambda k: z, *args)
        return torch.stack([*states, x0], 1).float().cpu().numpy()
    clips, parts, start = clips.to(device), [], 0
    caches = [net(clips, common.t_like(0, clips), c, write=True)["cache"]
              for c in [cond if guidance else uncond] + [uncond] * (guidance not in (0, 1))]
    for size in common.chunks(clips.shape[2], net.chunk):
        past = [common.forget(cache, start, 0) for cache in caches]
        x0, states = common.heun(net, lambda k: z[:, :, start:start + size], *args, start=start,
                                 cache=past[0], uncond_kw=dict(cache=past[-1]))
        parts.append(torch.stack([*states, x0], 1))
        start += size
    return torch.cat([torch.cat(parts, 3), clips[:, None]], 1).float().cpu().numpy()


def write_meta(folder, meta):
    """Writes meta.json, or raises BadInput where the folder's is another."""
    local = isinstance(folder, Path)
    if local:
        files.make(folder)
    with open(folder / ".lock", "w") if local else nullcontext() as handle:
        if local:
            with suppress(OSError):                     # of a file system without locks
                fcntl.flock(handle, fcntl.LOCK_EX)      # of two that start at once one is the first
        old = data.meta(folder)
        for key in [k for k in meta if old and k != "teacher" and old.get(k) != meta[k]]:
            was, now = ("others" if key == "labels" else v.get(key) for v in (old, meta))
            raise common.BadInput(f"{folder} holds pairs made with {key} {was}, not {now}; give another "
                                  f"--out, or the settings of its meta.json")
        if not old:
            files.write(folder / "meta.json", lambda f: f.write(f"{json.dumps(meta)}\n".encode()))


def missing(folder, meta):
    """Numbers of the shards that are not there, or, on a disk, not whole."""
    todo, there = {*range(-(-meta["pairs"] // meta["shard"]))}, {*files.names(folder)}
    for k in [k for k in todo if f"{k:07d}.npy" in there]:
        with suppress(common.BadInput):
            if isinstance(folder, Path):
                data.pairs_shard(folder, meta, k)
            todo.remove(k)
    return sorted(todo)


def main(argv):
    parser = train.Parser("make_pairs.py", usage=__doc__,
                          formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", required=True, help="folder or URL")
    parser.add_argument("--teacher", default="assets/digits.pth", help="weights, path[#entry]")
    parser.add_argument("--net", default="edm:digits", help="the teacher's, family:size[,option=value]")
    parser.add_argument("--data", default="digits", help="whose labels the pairs have")
    parser.add_argument("--pairs", type=int, default=20000, help="number of pairs")
    parser.add_argument("--path_t", default="80,2.5,0.8,0.4", help="times of the states to keep, descending")
    parser.add_argument("--steps", type=int, default=18, help="of the solver")
    parser.add_argument("--solver", default="heun", help="heun or euler")
    parser.add_argument("--guidance", type=float, default=1.0, help="1 = conditional, 0 = unconditional")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard", type=int, default=1000, help="pairs of a file")
    parser.add_argument("--batch", type=int, default=250, help="pairs solved at once")
    parser.add_argument("--device", default="", help="cuda, mps or cpu; empty: the best there is")
    args = parser.parse_args(argv)

    # everything that can be wrong with the input
    device, rank, world, group = sample.start(args.device)
    folder = files.place(args.out)
    common.known("--solver", args.solver, ORDERS)
    for key, low in dict(pairs=2, shard=1, batch=1, seed=0).items():
        common.number(f"--{key}", getattr(args, key), low)
    common.number("--guidance", args.guidance)
    found = data.load(trainer.defaults | dict(data=args.data, net=args.net))
    source = ckpt.resolve(args.teacher)
    with torch.device("meta"):
        model = dict(teacher=common.make_net(args.net, label_dim=found.classes))
    net = sample.frozen(model, dict(teacher=args.teacher), {args.teacher: ckpt.read(source)})["teacher"]
    path_t = [common.number("--path_t", t, 1e-6) for t in args.path_t.split(",")]
    limit = common.schedules[net.schedule][2]
    if path_t != sorted({*path_t}, reverse=True) or path_t[0] > limit:
        raise common.BadInput(f"--path_t {args.path_t} must be times that descend from at most {limit:g} "
                              f"(schedule {net.schedule})")
    common.t_list(net.schedule, args.steps)
    order = data.indices(args.seed, range(args.pairs), len(found))
    labels = found.label[order].tolist() if found.classes else None
    causal = dict(chunk=net.chunk, path_t=[*path_t, 0.0]) if getattr(net, "chunk", 0) else {}
    written = dict(texts=True) if hasattr(found, "texts") else {}
    told = lambda ids: found.texts(order[list(ids)]) if written else {}                         # noqa: E731
    if "caption" in told([0]) and "cond" not in told([0]):
        raise common.BadInput(f"--data {args.data} has captions, no embeddings; make these first: torchrun "
                              f"tools/encode.py --net {args.net} --data {args.data} --out FOLDER ...")
    clip = lambda i: encoders.scaled(torch.from_numpy(np.array(found.get(order[i])[0])))        # noqa: E731
    same = ("pairs", "shard", "seed", "net", "data", "steps", "solver", "guidance")
    meta = {k: getattr(args, k) for k in same} | dict(
        path_t=path_t, schedule=net.schedule, shape=list(net.x_shape), classes=found.classes, labels=labels,
        teacher=args.teacher, weights={k: source[k] for k in ("entry", "size", "crc")}) | causal | written
    common.on_rank0(lambda: write_meta(folder, meta), group)
    todo = common.from_rank0(missing(folder, meta) if rank == 0 else None, group)

    # solve: rank j % world makes the j-th missing file, in batches that do not depend on the ranks
    net, began, mine = net.to(device), time.time(), todo[rank::world]
    for done, k in enumerate(mine, 1):
        ids = range(k * args.shard, min((k + 1) * args.shard, args.pairs))
        batches = [ids[i:i + args.batch] for i in range(0, len(ids), args.batch)]
        shown = lambda some: torch.stack([*map(clip, some)]) if causal else None                # noqa: E731
        rows = np.concatenate([solve(net, meta, some, device, shown(some), told(some)) for some in batches])
        files.write(folder / f"{k:07d}.npy", lambda f: np.save(f, rows))
        if rank == 0:
            print(f"{done}/{len(mine)} files, {time.time() - began:.0f} s", flush=True)
    if group:
        dist.barrier()
    if rank == 0:
        print(f"{folder}: {args.pairs} pairs, {len(todo)} files made now; train on them with --data {folder}")
    trainer.close(group)


if __name__ == "__main__":
    train.run(main)
