"""FSDP2: every rank holds some rows (dim 0) of each parameter, its gradient, its moments and its average.

Every net is sharded, trained or frozen: its units are gathered for their own forward and backward pass only.
A net too small to have units is replicated, its gradients averaged. With shard_size=N rows are shared by
groups of N ranks, the groups hold the same (HSDP). Under amp units are gathered and computed in that type;
rows, gradients, moments and averages stay float32.

The root is resharded after its forward pass too. FSDP2's default leaves it gathered, and what is then written
to an average between two passes is lost in silence. No input is cast: nets cast x_t themselves and t must
stay exact. Works on CPUs with gloo. A tensor is "whole", or, here and on this rank, "local".
"""
import contextlib
import ctypes
import functools

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

DTYPES = dict(bf16=torch.bfloat16, fp16=torch.float16)
LEAST = 1_000_000    # parameters of a net without named units that is worth sharding, and of its units


def make_mesh(cfg, world, device, limit):
    """None for replicas, else a mesh of all ranks, ("shard",) or ("replicate", "shard"), this timeout."""
    if cfg["parallel"] == "ddp":
        return None
    if device.type == "cpu" or cfg["offload"]:
        keep_freed(2 ** 20)                             # what a reshard frees, nearly a net, must go back
    size = cfg["shard_size"] or world
    shape = dict(replicate=world // size, shard=size) if size < world else dict(shard=size)
    mesh = dist.device_mesh.init_device_mesh(device.type, (*shape.values(),), mesh_dim_names=(*shape,))
    for group in mesh.get_all_groups():                 # new ones have torch's default timeout
        dist.distributed_c10d._set_pg_timeout(limit, group)
    return mesh


def keep_freed(most):
    """glibc, where it is the allocator: freed blocks up to `most` bytes stay with the process, larger ones go
    back to the system. Its own rule gives back most of what a pass on the CPU frees, to have it cleared for
    the next one: 6 % of a training step."""
    with contextlib.suppress(AttributeError, OSError):
        for option, size in ((-3, most), (-1, 32 * most)):      # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
            ctypes.CDLL(None).mallopt(option, size)


def units(net):
    """The modules of a net that are gathered one at a time: those it names in `blocks`, else the smallest
    ones that hold a 64th of a big net. None for a small one."""
    if getattr(net, "blocks", None):
        return [net.get_submodule(name) for name in net.blocks]
    count = lambda module: sum(p.numel() for p in module.parameters())                    # noqa: E731
    least, found = max(LEAST, count(net) // 64), []

    def left(module):
        """Parameters below `module` that no unit holds yet."""
        n = count(module)
        if not isinstance(module, torch.nn.MultiheadAttention):         # which does not call its children
            n = sum(p.numel() for p in module.parameters(recurse=False)) + sum(map(left, module.children()))
        if n < least or isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)):     # never called
            return n
        found.append(module)
        return 0

    left(net)
    return found


def wrap(net, cfg, mesh, device):
    """Prepare a net on the meta device in place: recomputation, compilation, shards. Then give it storage."""
    found = units(net)
    if cfg["recompute"]:
        for module in found:
            module.forward = recomputed(module.forward)
    if cfg["compile"]:          # blocks share their code: a graph for each, or most would run without one
        from torch._dynamo import config as dynamo
        dynamo.recompile_limit = dynamo.accumulated_recompile_limit = 4096
        for module in found or [net]:
            module.compile(dynamic=False)
    split = mesh is not None and bool(found)
    if split:
        from torch.distributed.fsdp import (
            CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard)
        how = dict(
            mesh=mesh, reshard_after_forward=cfg["reshard"],
            mp_policy=MixedPrecisionPolicy(DTYPES.get(cfg["amp"]), torch.float32, cast_forward_inputs=False),
            offload_policy=CPUOffloadPolicy(device.type == "cuda") if cfg["offload"] else OffloadPolicy())
        for module in [*(m for m in found if m is not net), net]:
            module.register_forward_hook(own_outputs)
            fully_shard(module, **how)
    net.to_empty(device="cpu" if cfg["offload"] and split else device)
    for module in net.modules():                        # FSDP2 offloads parameters, not buffers
        for key, buffer in module._buffers.items():
            module._buffers[key] = None if buffer is None else buffer.to(device)
    if split:               # FSDP2's lazy start takes the type of gradients from the parameters that require
        net._get_fsdp_state()._lazy_init()      # them: it must see all that ever will, not the first phase's


def own_outputs(module, args, output):
    """No output is a view: what is done to one in place would cut off FSDP2's hook on its gradient."""
    own = lambda x: x.clone() if torch.is_tensor(x) and x.requires_grad and x._is_view() else x  # noqa: E731
    return tree_map(own, output)


def recomputed(forward):
    """`forward` with its activations thrown away and computed again in the backward pass."""
    @functools.wraps(forward)
    def run(*args, **kw):
        if not torch.is_grad_enabled() or torch._C._functorch.peek_interpreter_stack() is not None:
            return forward(*args, **kw)                 # nothing to keep; or inside a jvp, where it fails
        return checkpoint(forward, *args, use_reentrant=False, **kw)
    return run


def sharded(tensor):
    """True of a DTensor. (Its module takes a second to import, so it isn't here unless something is.)"""
    return hasattr(tensor, "device_mesh")


def local(tensor):
    """What this rank holds of a tensor: a view that shares its memory."""
    return tensor.detach().to_local() if sharded(tensor) else tensor.detach()


def rows(tensor):
    """(first, behind the last) of the rows that this rank holds; torch.chunk's division. None if whole."""
    if not sharded(tensor):
        return None
    mesh, n = tensor.device_mesh, tensor.shape[0]
    each = -(-n // mesh.size(mesh.ndim - 1))
    at = mesh.get_coordinate()[-1]
    return min(at * each, n), min((at + 1) * each, n)


@torch.no_grad()
def put(tensor, whole):
    """Copy a whole tensor into one that may be sharded."""
    here = rows(tensor)
    local(tensor).copy_(whole if here is None else whole[here[0]:here[1]])


def whole(tensor, device):
    """The whole tensor on `device`; every rank must ask."""
    return tensor.detach().to(device).full_tensor() if sharded(tensor) else tensor.detach().to(device)


def reshard(nets):
    """Nothing stays gathered: what is about to be written is the rows."""
    for module in (m for net in nets for m in net.modules()):
        if hasattr(module, "set_reshard_after_forward"):
            module.reshard()


def turn_to(phase, owned, nets):
    """From here on only the parameters of this phase's optimizer (owned: those of each) require gradients.
    FSDP2 would pass that on to the gathered twin of a parameter in its next forward pass, which fails inside
    torch.func.jvp (2.13)."""
    for other, params in owned.items():
        for p in params:
            p.requires_grad_(other == phase)
    for module in (m for net in nets.values() for m in net.modules() if hasattr(m, "_get_fsdp_state")):
        for group in getattr(module._get_fsdp_state(), "_fsdp_param_groups", ()):
            for p in group.fsdp_params:
                if hasattr(p, "_unsharded_param"):
                    p._unsharded_param.requires_grad_(p.sharded_param.requires_grad)


def split_groups(opt):
    """Replicated and sharded parameters in groups of their own: fused optimizers take no mixture."""
    for group in list(opt.param_groups):
        plain = [p for p in group["params"] if not sharded(p)]
        if 0 < len(plain) < len(group["params"]):
            group["params"] = [p for p in group["params"] if sharded(p)]
            opt.add_param_group(dict(group, params=plain))


def norm(grads, mesh, device):
    """Norm over whole gradients, a tensor () on the device: alike, bit for bit, on every rank. Rows count
    once per group of ranks, replicated tensors once. After average_gradients."""
    over = lambda part: torch.linalg.vector_norm(torch.stack(torch._foreach_norm(part)))  # noqa: E731
    if mesh is None:
        return over(grads)
    parts, ranks = ([], []), dist.get_world_size()      # sharded, replicated
    for g in grads:
        parts[not sharded(g)].append(local(g))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for part, times in zip(parts, (mesh.size(0) if mesh.ndim == 2 else 1, ranks)):
        if part:
            total += over(part).double().to(device) ** 2 / times
    dist.all_reduce(total)
    return total.sqrt().float()
