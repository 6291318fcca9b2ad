"""Weights into nets: drawn, from a file, from another net, from a checkpoint; nets whole or in shards.

A net is built on the meta device; its `model` is a copy that stays there and knows names and shapes. Rank 0
reads files and sends tensor by tensor, every rank keeps its rows; of a sharded checkpoint each rank reads its
own rows. So no rank holds more than its shards, one tensor, and, rank 0, the file (mapped, not read at once).
"""
import re
import zlib
from graphlib import CycleError, TopologicalSorter

import torch
import torch.distributed as dist

import ckpt
import common
import shard
from common import BadInput


def fill(nets, models, inits, sources, state, trainable, cfg, device):
    """Every net: from the checkpoint `state` what it holds, the rest from `init`: a file (sources[name]: its
    tensors; emptied on the way), another net (filled before), or a fresh draw."""
    names = order(nets, inits)
    for n, name in enumerate(names):
        net, model, source = nets[name], models[name], inits.get(name)
        own, kept, given = model.state_dict(), state["nets"].get(name) if state else None, {}
        complete = kept is not None and set(kept) == set(own)
        if source is not None and not complete:
            at, given = fitting(models, name, source, sources)
        draw(net, model, name, cfg["seed"], own if complete else given)
        tensors = net.state_dict()
        held = nets[source].state_dict() if source in nets else sources.get(source)
        for key, spec in given.items():
            if source in nets:
                value = adapt(model, key, shard.whole(held[at[key]], device))
            else:
                value = spread(lambda: adapt(model, key, held[at[key]]), spec, device)
            shard.put(tensors[key], value)
        if kept is not None:
            check(own, kept, f"{name} (checkpoint)", keys=saved_keys(model, trainable[name]))
            take_all(net, kept, device)
        if source not in map(inits.get, names[n + 1:]):
            sources.pop(source, None)                   # a big file need not stay in memory


def needed(models, inits, state):
    """The sources that have to be read: those of nets that the checkpoint does not hold whole."""
    kept = state["nets"] if state else {}
    return {inits[n] for n in models if inits.get(n, n) not in models
            and set(kept.get(n, ())) != set(models[n].state_dict())}


def order(nets, inits):
    """Names of nets, each after the one it starts from. BadInput where there is no such order."""
    try:
        return [*TopologicalSorter({n: {inits.get(n)} & nets.keys() for n in nets}).static_order()]
    except CycleError as e:
        raise BadInput(f"init() goes in a circle: {' <- '.join(e.args[1][::-1])}") from None


def draw(net, model, name, seed, given=()):
    """Draw what is not in `given` (keys that are about to be loaded): module by module, whole, on the CPU,
    from the default generator seeded by (seed, name, module), so that the result depends on nothing else.
    Buffers that are in no checkpoint are rebuilt on the way."""
    tensors, given = dict([*net.named_parameters(), *net.named_buffers()]), set(given)
    for module_name, module in model.named_modules():
        def own():
            tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            return {f"{module_name}.{k}".lstrip("."): v for k, v in tensors}
        if own().keys() <= given:                       # nothing here, or all of it is loaded
            continue
        if not hasattr(module, "reset_parameters"):
            raise BadInput(f"{type(module).__name__} ({name}.{module_name}) owns {min(own())} but has "
                           f"no reset_parameters(); give it one that fills its parameters and buffers")
        module.to_empty(device="cpu", recurse=False)
        common.seed_default(common.hash_seed(seed, name, module_name))
        module.reset_parameters()
        for key, tensor in own().items():
            shard.put(tensors[key], tensor)
        module.to_empty(device="meta", recurse=False)


def adapt(model, key, tensor):
    """A source's tensor in the net's own shape; None for a key that the net knowingly drops."""
    return model.adapt(key, tensor) if hasattr(model, "adapt") else tensor


def theirs(model, layout):
    """{key in a layout of `model.layouts`, which are substitutions (pattern, replacement): the net's own}."""
    names = {}
    for key in model.state_dict():
        name = key
        for pattern, replacement in getattr(model, "layouts", {}).get(layout, ()):
            name = re.sub(pattern, replacement, name)
        names[name] = key
    return names


def fitting(models, name, source, sources):
    """({the net's own name: the source's}, {own name: shape and type, on the meta device}) of what a source
    gives a net; nothing is read. A source has the net's own names, or the layout that most of its keys belong
    to. BadInput where it does not fit."""
    model, held = models[name], models[source].state_dict() if source in models else sources[source]
    ways = [theirs(model, layout) for layout in ("", *getattr(model, "layouts", ()))]
    best = max(ways, key=lambda names: len(names.keys() & held.keys()))
    at = {best.get(key, key): key for key in held}
    specs = {own: adapt(model, own, ckpt.spec(held, key).to("meta")) for own, key in at.items()}
    given = {own: spec for own, spec in specs.items() if spec is not None}
    check(model.state_dict(), given, f"{name} ({source})", optional=model.optional)
    return at, given


def check(own, held, what, keys=None, optional=()):
    """BadInput unless `held` has the `keys` (default: all) of `own`, in their shapes, and nothing else; those
    under a prefix in `optional` may be absent."""
    keys, shapes = set(own if keys is None else keys), {k: tuple(ckpt.spec(held, k).shape) for k in held}
    missing = sorted(k for k in keys - set(shapes) if not k.startswith(tuple(optional) or ("\0",)))
    unknown = sorted(set(shapes) - keys)
    wrong = [f"{k} {s} for {tuple(own[k].shape)}" for k, s in shapes.items()
             if k in keys and s != tuple(own[k].shape)]
    problems = [f"{len(p)} {kind} ({', '.join(p[:3])}{', ...' if len(p) > 3 else ''})"
                for kind, p in (("missing", missing), ("unknown", unknown), ("misshapen", wrong)) if p]
    if problems:
        raise BadInput(f"weights of {what} do not fit the net: {'; '.join(problems)}; are --net and the "
                       f"method's keys those they were made with? --name NEW starts a new run")


def spread(read, spec, device):
    """What read() gives on rank 0, on every rank; spec has its shape and type (`ckpt.shared`)."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return read()
    out = torch.empty(spec.shape, dtype=spec.dtype, device=device)
    if dist.get_rank() == 0:
        out.copy_(read())
    dist.broadcast(out.reshape(-1).view(torch.uint8), 0)
    return out


@torch.no_grad()
def take(own, held, key, device):
    """A saved tensor into `own`, which may be sharded."""
    if key in getattr(held, "index", ()) and shard.sharded(own):
        shard.local(own).copy_(held.rows(key, *shard.rows(own)))
    else:
        shard.put(own, spread(lambda: held[key], ckpt.spec(held, key), device))


def take_all(net, held, device):
    tensors = net.state_dict()
    for key in held:
        take(tensors[key], held, key, device)


def saved_keys(net, trainable):
    """Keys of a net in a checkpoint: trainable parameters and buffers; frozen ones come from their source."""
    parameters = {k for k, _ in net.named_parameters()}
    return [k for k in net.state_dict() if k in trainable or k not in parameters]


def uneven_buffers(nets, gloo):
    """Names of buffers that are not the same on every rank; only rank 0's are kept."""
    crcs = {f"{n}.{k}": zlib.crc32(b.detach().cpu().reshape(-1).view(torch.uint8).numpy())
            for n, net in nets.items() for k, b in net.named_buffers()}
    everywhere = common.everyone(crcs, gloo) if crcs else []
    return sorted({k for other in everywhere for k in crcs if other[k] != everywhere[0][k]})


def saved_state(name, net, trainable):
    """What a checkpoint holds of a net. Raises BadInput rather than keep weights that are not finite."""
    state = net.state_dict()
    bad = [k for k in trainable if not shard.local(state[k]).isfinite().all()]
    if bad:
        raise BadInput(f"{len(bad)} weights of {name} are not finite ({bad[0]}, ...), so no checkpoint is "
                       f"written; a lower --lr or --clip may help")
    return {k: state[k] for k in saved_keys(net, trainable)}


def saved_moments(opt, names):
    """An optimizer's state by parameter: {"net.key/exp_avg": tensor, ...}."""
    return {f"{names[p]}/{slot}": value for p, held in opt.state.items() for slot, value in held.items()}


def take_moments(opts, names, saved, device):
    """Moments and step counts by parameter name; learning rates and the like stay as configured now."""
    for phase, opt in opts.items():
        held, state = saved.get(phase, {}), {}
        own = {names[p]: (i, p) for i, p in enumerate(p for g in opt.param_groups for p in g["params"])}
        for key in held:
            name, _, slot = key.rpartition("/")
            if name not in own:
                continue
            (i, p), spec = own[name], ckpt.spec(held, key)
            if spec.shape == p.shape:
                value = torch.empty_like(p, dtype=spec.dtype, requires_grad=False)
                take(value, held, key, device)
            else:
                value = spread(lambda: held[key], spec, device) if spec.dim() else held[key]
            state.setdefault(i, {})[slot] = value
        opt.load_state_dict(dict(state=state, param_groups=opt.state_dict()["param_groups"]))
