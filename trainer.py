"""The loop, in order of execution.

    for it in range(start, max_iter):
        phase = method.phase(it, cfg)                  one iteration = one phase = one optimizer = one loss
        for micro in range(accum):                     slice j = micro * world + rank of the global batch
            reseed(seed, it, j)                        draws depend on nothing else: resume is exact
            loss, logs = method.step(nets, batch, it, cfg)
            scale(loss / accum).backward()
        average gradients over the ranks; norm; skip if it is not finite; clip; optimizer; post_step; EMA
        log line, checkpoint, validation, samples, preemption: each after iteration it, where it is due

What a method file may rely on: its nets hold float32 weights on the device, filled from `init`; only the
parameters of the phase's optimizer require gradients; batch = dict(x0 (B,C,[T,]H,W) float32, cond {},
uncond {}, id (B,)); an iteration computes the same on W ranks x A micro-steps as on one rank x W A; modes are
as `build` left them.
"""
import contextlib
import copy
import shlex
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ckpt
import common
import data
import logs
import resume
import startup
from common import BadInput, from_rank0
from nets import encoders

ROOT = Path(__file__).resolve().parent
DTYPES = dict(bf16=torch.bfloat16, fp16=torch.float16)

defaults = dict(
    net="edm:digits",        # family:size[,option=value]: edm:cifar10, edm:imagenet64, edm:digits, toy:tiny
    data="digits",           # "digits" (embedded), or a folder of images, a .zip with dataset.json, an .npz
    classes=-1,              # classes the nets are built for: -1 = those of the data, 0 = unconditional
    val_data="",             # held-out data; "" = the held-out digits, for other data the training data
    xflip=False,             # random horizontal flips
    augment=0.0,             # probability of EDM's augmentations; 0 = off
    augment_ops=(),          # augmentations by name (augment.py); "" = EDM's published CIFAR-10 set
    workers=2,               # background threads that load data; 0 = load in the loop
    teacher="",              # weights of the teacher, path[#entry]
    steps=1,                 # steps of the student's sampler
    guidance=1.0,            # classifier-free guidance of the teacher: 1 = conditional, 0 = unconditional
    recipes="",              # method whose presets in recipes.py apply; a copied file keeps finding them
    batch_size=64,           # samples of one iteration over all ranks and micro-steps
    accum=1,                 # micro-steps per iteration; per device: batch_size / (ranks x accum)
    max_iter=10000,          # iterations in all, every phase counted
    stop_at=0,               # save and exit once so many iterations are done, schedules untouched; 0 = off
    seed=0,                  # of data order, initial weights and every draw
    lr=1e-4,                 # learning rate of the student
    lr_schedule="constant",  # constant, cosine[:floor fraction], inv_sqrt:updates; by the phase's own updates
    warmup=0,                # linear warm-up in the phase's own updates; 0 = off
    clip=10.0,               # gradient norm over all nets of the phase; 0 = no clipping
    max_skipped=100,         # a phase's updates skipped in a row (not finite) before giving up; 0 = never
    amp="",                  # "" = float32, bf16, fp16: autocast around step
    tf32=True,               # TF32 matrix products and convolutions on CUDA
    device="",               # "" = the best there is: cuda, mps, cpu
    parallel="ddp",          # ddp: replicas
    ema=("ema",),            # student averages: name[:rate], name:power=0.05, name:half_kimg=500; "" = none
    resume="auto",           # auto: newest checkpoint; force: also other data or method file; "": none
    save_every=1000,         # iterations between checkpoints; 0 = only at the end
    keep_last=0,             # newest checkpoints that are kept; 0 = all
    val_every=1000,          # iterations between validations (and one before the first); 0 = off
    val_batches=4,           # batches of one validation
    val_settings=(),         # more validations under changed keys, e.g. guidance=1,guidance=2;steps=1
    sample_every=1000,       # iterations between sample grids; 0 = off
    log_every=100,           # iterations between log lines; 0 = off
    wandb="",                # "" = online if a key is configured; online, offline, disabled
    project="fewstep",       # first part of the output folder under $FEWSTEP_OUTPUT_ROOT (default outputs)
    group="",                # second part; "" = last path component of data
    name="",                 # third part; "" = name of the method file (+ preset)
    log_level="info",        # info, warning; debug: every rank speaks
    debug_calls=False,       # compare the order of net calls over the ranks, every micro-step
)


def train(method, cfg, changed=(), dry_run=False):
    """Run a method to cfg["max_iter"]. `changed`: {key: default} of what preset and command line set. Bad
    input raises BadInput before the process group starts."""
    # ---- everything that can be wrong with the input
    rank, world, local = startup.ranks()
    startup.check(cfg, world, defaults)
    device = startup.pick_device(cfg, local)
    dataset = data.load(cfg)
    if cfg["classes"] < 0:
        cfg["classes"] = dataset.classes
    with torch.device("meta"):
        nets = startup.call(method, "build", cfg)
    if "student" not in nets:
        raise BadInput(f"{method.path}: build() returns {', '.join(nets)}; the net that samples is "
                       f"named student")
    shape = tuple(nets["student"].x_shape)
    val_set = data.load(cfg, split="val") if cfg["val_every"] else dataset
    for key, some in ("data", dataset), ("val_data", val_set):
        if shape != tuple(some.shape):
            raise BadInput(f"--{key} {cfg[key]} has samples of shape {tuple(some.shape)}, --net {cfg['net']} "
                           f"takes {shape}; choose a net of that shape")
    trainable = {n: [k for k, p in net.named_parameters() if p.requires_grad] for n, net in nets.items()}
    inits, turns = startup.check_method(method, cfg, nets, trainable)
    startup.check_settings(method, cfg, nets, world, defaults)
    folder = startup.output_folder(cfg)
    found = startup.check_folder(method, cfg, folder)
    fingerprint = startup.fingerprint(cfg, dataset)
    hint = (f"make one with `torchrun train.py methods/sft.py --net {cfg['net']} --data {cfg['data']}`, or "
            f"give --teacher PATH[#ENTRY]")
    if not found:
        sources = {s: ckpt.resolve(s, hint) for s in inits.values() if s not in nets}
    if dry_run:
        return logs.show_plan(method, cfg, changed, nets, trainable, world, folder)
    if not found:
        startup.fill(nets, inits, sources, None, trainable, cfg)
    startup.make_folder(folder, f"output folder {folder} is not writable",
                        "set FEWSTEP_OUTPUT_ROOT to one that is", ("checkpoints", "samples"))

    # ---- process group: gloo for flags, the default back-end (NCCL on CUDA) for tensors
    gloo = None
    if world > 1:
        with resume.orphans_leave():
            dist.init_process_group()
            gloo = dist.new_group(backend="gloo") if device.type == "cuda" else dist.group.WORLD
    say = logs.Printer(cfg["log_level"], rank, cfg["max_iter"])
    lock = startup.take_lock(folder, rank, gloo)                # held until this process ends
    found = from_rank0(startup.check_folder(method, cfg, folder), gloo)     # a run may just have saved there
    start, state = 0, None
    if found:
        if rank == 0:
            start, state = ckpt.newest(folder / "checkpoints", lambda text: say(text, "warning"))
        start = from_rank0(start, gloo)
        if start is None:
            raise BadInput(f"no checkpoint in {folder} can be read; remove them to start anew, or use "
                           f"--name NEW")
        state = state or ckpt.load(ckpt.path(folder / "checkpoints", start))
        startup.check_folder(method, cfg, folder, state, fingerprint)
        sources = {s: state["sources"].get(s) or ckpt.resolve(s, hint)
                   for s in inits.values() if s not in nets}
    if start >= cfg["max_iter"] or 0 < cfg["stop_at"] <= start:
        key = "max_iter" if start >= cfg["max_iter"] else "stop_at"
        say(f"nothing to do: {folder} has done {start} iterations and {key} is {cfg[key]}", "warning")
        return close(gloo)
    last = min(cfg["stop_at"] or cfg["max_iter"], cfg["max_iter"])

    # ---- nets, EMAs, optimizers
    ema_specs = {e: common.parse_ema(e) for e in cfg["ema"]}
    if state:
        startup.fill(nets, inits, sources, state, trainable, cfg)
    emas = {spec[0]: copy.deepcopy(nets["student"]).requires_grad_(False).eval()
            for spec in ema_specs.values()}
    for name in emas.keys() & state["emas"] if state else ():
        ckpt.fill(emas[name], state["emas"][name], name,
                  keys=startup.saved_keys(emas[name], trainable["student"]))
    for net in [*nets.values(), *emas.values()]:
        net.to(device)
        if world > 1:                                   # every replica starts from rank 0's, whatever it read
            for tensor in [*net.parameters(), *net.buffers()]:
                dist.broadcast(tensor.detach(), 0)
    if state is None:
        post_step(nets.values())
    opts = method.optimizers(nets, cfg)
    owned = {phase: [p for g in opt.param_groups for p in g["params"]] for phase, opt in opts.items()}
    names = {p: f"{n}.{k}" for n, net in nets.items() for k, p in net.named_parameters()}
    phase_nets = {phase: [net for n, net in nets.items() if any(names[p].startswith(n + ".") for p in params)]
                  for phase, params in owned.items()}
    for opt in opts.values():
        for group in opt.param_groups:
            group["initial_lr"] = group["lr"]
    ema_tensors = {name: averaged(ema, nets["student"], trainable["student"]) for name, ema in emas.items()}
    scaler = torch.amp.GradScaler(device.type, enabled=cfg["amp"] == "fp16", init_scale=2.0 ** 16)
    counts, skipped = ({phase: 0 for phase in opts} for _ in range(2))
    if state:
        startup.load_optimizers(opts, names, state["optims"])
        for ours, kept in (counts, state["counts"]), (skipped, state["skipped"] or {}):
            ours |= {k: v for k, v in kept.items() if k in ours}
        if state["scaler"] and scaler.is_enabled():
            scaler.load_state_dict(state["scaler"])
    autocast = lambda: torch.autocast(  # noqa: E731
        device.type, DTYPES.get(cfg["amp"]), enabled=bool(cfg["amp"]))
    torch.set_float32_matmul_precision("high" if cfg["tf32"] else "highest")
    torch.backends.cudnn.allow_tf32 = cfg["tf32"]

    # ---- run folder and loggers
    if rank == 0:
        startup.open_folder(method, cfg, folder, sources, state, start, say)
    say(logs.describe(cfg, nets, trainable, opts, names, turns, world, device, start, changed))
    if rank == 0:
        say(logs.data_line(cfg, dataset, nets["student"]))
    if resume.scheduler.resume_details():
        say(resume.scheduler.resume_details())
    wandb = logs.start_wandb(cfg, folder, say) if rank == 0 else None
    record = logs.Recorder(folder, wandb, rank, gloo, say)
    meter = logs.Meter(gloo)
    loader = data.Loader(dataset, cfg, start, rank, world, cfg["accum"], cfg["seed"])
    calls = watch_calls(nets) if cfg["debug_calls"] and world > 1 else None
    stopping = lambda: resume.agreed(gloo, resume.requested())                                    # noqa: E731
    saved, state = (start if state else -1), None       # frees what a resume has read

    def checkpoint(done, group=gloo):
        """Write N.pth on rank 0; every rank learns if that worked. Keeps what a resume cannot recompute."""
        nonlocal saved
        if saved == done:
            return
        saved, error = done, None                       # tried once, on a full disk too
        if rank == 0:
            try:
                content = dict(
                    format=ckpt.FORMAT, it=done, method=method.path.stem, config=dict(cfg), counts=counts,
                    skipped=skipped, sources=sources, data=fingerprint, scaler=scaler.state_dict(),
                    nets={n: startup.saved_state(n, net, trainable[n])
                          for n, net in nets.items() if trainable[n] or not list(net.parameters())},
                    emas={n: startup.saved_state(n, ema, trainable["student"]) for n, ema in emas.items()},
                    optims={p: {names[q]: s for q, s in opt.state.items()} for p, opt in opts.items()})
                ckpt.save(ckpt.path(folder / "checkpoints", done), content)
                ckpt.prune(folder / "checkpoints", cfg["keep_last"], done)
            except BadInput as e:
                error = str(e)
        error = from_rank0(error, group)
        if error:
            raise BadInput(error)

    def look(done, at_start=False):
        """Validation and sample grid where due (at the start: those an interrupted run still owes)."""
        due = lambda every: every and (done % every == 0 or done == cfg["max_iter"])         # noqa: E731
        if due(cfg["val_every"]) and not (at_start and record.has(done, "val/")):
            with judging(nets, emas):
                values = validate(method, nets, cfg, val_set, done, rank, world, gloo, device, autocast,
                                  stopping)
            if values is None:
                return
            record(done, values)
            say(f"it {done:07d} | " + " ".join(f"{k} {v:.4g}" for k, v in values.items()))
        grid = folder / "samples" / f"{done:07d}.png"
        if rank == 0 and due(cfg["sample_every"]) and not (at_start and grid.exists()):
            with judging(nets, emas), autocast():
                x0, columns = draw_grid(method, next(iter(emas.values()), nets["student"]), cfg, device)
            try:
                logs.save_grid(encoders.decode(x0, cfg), grid, columns)
                if wandb:
                    wandb.log({"samples": wandb.Image(str(grid))}, step=done)
            except BadInput as e:                       # a picture is not worth a run
                say(f"WARNING: {e}", "warning")

    # ---- the loop
    look(start, at_start=True)
    done, clock, busy, previous = start, 0.0, 0.0, None
    if stopping():
        checkpoint(start)
    try:
        while done < last and not stopping():
            it, began = done, time.perf_counter()
            phase = method.phase(it, cfg)
            opt, params = opts[phase], owned[phase]
            if phase != previous:
                for other, ps in owned.items():
                    for p in ps:
                        p.requires_grad_(other == phase)
                previous = phase
            for micro in range(cfg["accum"]):
                waited = time.perf_counter()
                raw = next(loader)
                meter.add("data_ms", (time.perf_counter() - waited) * 1e3 * cfg["accum"])
                common.seed_default(common.hash_seed(cfg["seed"], it, micro * world + rank))
                batch = encoders.encode(raw, cfg, device)
                with autocast():
                    loss, parts = startup.call(method, "step", nets, batch, it, cfg)
                if not (torch.is_tensor(loss) and loss.requires_grad):
                    raise BadInput(f"{method.path}: step() at it {it} (phase {phase!r}) returned a loss that "
                                   f"depends on no parameter of that optimizer; is something under no_grad?")
                scaler.scale(loss / cfg["accum"]).backward()
                suffix = "" if phase == "student" else f"_{phase}"
                meter.add(f"loss{suffix}", loss)
                for key, value in parts.items():
                    meter.add(key, value)
                if calls is not None:
                    compare_calls(calls, it, gloo)
            average_gradients(params, gloo, world)
            scaler.unscale_(opt)
            grads = [p.grad for p in params if p.grad is not None]
            norm = clip(grads, cfg["clip"])                 # the iteration's one device sync
            if norm < float("inf"):
                factor = common.lr_factor(cfg["lr_schedule"], counts[phase], cfg["warmup"], turns[phase])
                for group in opt.param_groups:
                    group["lr"] = group["initial_lr"] * factor
                done = None                             # till EMAs have moved, the weights are no iteration's
                opt.step()
                counts[phase], skipped[phase] = counts[phase] + 1, 0
                post_step(phase_nets[phase])
                if phase == "student":
                    for e, (name, *_) in ema_specs.items():
                        update_ema(ema_tensors[name], common.ema_beta(e, counts[phase], cfg["batch_size"]))
                meter.add(f"norm{suffix}", norm)
                meter.add(f"lr{suffix}", opt.param_groups[0]["lr"])
            else:                                       # what is not finite never reaches the weights
                skipped[phase] += 1
                meter.add("skipped", 1.0, total=True)
            scaler.update()
            opt.zero_grad(set_to_none=True)
            done = it + 1
            if 0 < cfg["max_skipped"] <= skipped[phase]:
                raise BadInput(f"the gradient was not finite {skipped[phase]} times in a row, last at it "
                               f"{it}, phase {phase!r} ({meter.text()}); --amp \"\" runs in float32, a lower "
                               f"--lr or --clip may help")
            spent = time.perf_counter() - began
            busy, clock = busy + spent, clock + spent

            if cfg["log_every"] and (done % cfg["log_every"] == 0 or done == last):
                n = min(done % cfg["log_every"] or cfg["log_every"], done - start)
                values = meter.flush() | dict(
                    ms_per_it=busy / n * 1e3, img_per_s=n * cfg["batch_size"] / busy,
                    mem_gb=logs.memory_gb(device), eta_s=(last - done) * clock / (done - start))
                busy = 0.0
                if scaler.is_enabled():
                    values["scale"] = scaler.get_scale()
                record(done, values)
                say(logs.log_line(done, cfg["max_iter"], values))
            say.progress(done)
            if done == last or (cfg["save_every"] and done % cfg["save_every"] == 0):
                checkpoint(done)
            look(done)                                   # after the save: what fails here costs nothing
    except Exception:                                   # nothing collective here: the others may have left
        if rank == 0 and done not in (None, saved, start):  # a first iteration that fails has gained nothing
            with contextlib.suppress(BadInput):         # the first sentence is the one that counts
                checkpoint(done, None)
                say(f"{done} iterations are in {ckpt.path(folder / 'checkpoints', done)}", "warning")
        raise

    # ---- the end: finished, stopped by --stop_at, or asked to leave
    preempted = done < last
    checkpoint(done)
    loader.close()
    file = ckpt.path(folder / "checkpoints", done)
    if preempted:
        say(f"asked to stop: {done} iterations are in {file}; the same command continues there", "warning")
        if rank == 0:
            resume.scheduler.request_resume()
    elif done < cfg["max_iter"]:
        say(f"stopped at --stop_at {cfg['stop_at']}: {file}", "warning")
    else:
        grid = folder / "samples" / f"{done:07d}.png"
        for phase in [p for p in opts if not counts[p]]:
            say(f"WARNING: no update of phase {phase!r} was applied", "warning")
        say(f"done: {file}\nsamples: {grid if grid.exists() else 'none'}", "warning")
        if cfg["data"] == "digits":
            say(f"score it: python evaluate.py {shlex.quote(str(folder))}", "warning")
    say.progress(None)
    if wandb:
        wandb.finish()
    lock.close()
    close(gloo)


# ---- one iteration -----------------------------------------------------------------------------------------

def average_gradients(params, gloo, world):
    """Mean over the ranks, in place. A parameter without gradient on every rank keeps None (AdamW would decay
    it); one without on some counts as zero there. Matches one process on the whole batch to rounding."""
    if world == 1:
        return
    has = torch.tensor([p.grad is not None for p in params], dtype=torch.uint8)
    dist.all_reduce(has, dist.ReduceOp.MAX, group=gloo)
    by_dtype = {}
    for p, there in zip(params, has.tolist()):
        if there:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            by_dtype.setdefault(p.grad.dtype, []).append(p.grad)
    for grads in by_dtype.values():
        flat = torch.cat([g.reshape(-1) for g in grads])
        dist.all_reduce(flat)
        flat /= world
        torch._foreach_copy_(grads, [f.view_as(g) for f, g in
                                     zip(flat.split([g.numel() for g in grads]), grads)])


def clip(grads, limit):
    """Global norm as a float. Scales the gradients in place to `limit` (0 = never) if finite and above."""
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads))).item()
    if 0 < limit < norm < float("inf"):
        torch._foreach_mul_(grads, limit / norm)
    return norm


def averaged(ema, net, trainable):
    """The tensors update_ema works on, listed once (walking the modules takes longer than the update): of the
    EMA and of the net, those that are averaged, and the buffers, which are copied."""
    own, other = dict(ema.named_parameters()), dict(net.named_parameters())
    return ([own[k] for k in trainable], [other[k] for k in trainable],
            list(ema.buffers()), list(net.buffers()))


@torch.no_grad()
def update_ema(tensors, beta):
    """ema <- beta ema + (1 - beta) net."""
    ema, net, ema_buffers, net_buffers = tensors
    torch._foreach_lerp_(ema, net, 1.0 - beta)
    if ema_buffers:
        torch._foreach_copy_(ema_buffers, net_buffers)


def post_step(nets):
    for net in nets:
        if hasattr(net, "post_step"):
            net.post_step()


def watch_calls(nets):
    """A list that grows by a net's name whenever one is called."""
    calls = []
    for name, net in nets.items():
        net.register_forward_pre_hook(lambda module, args, name=name: calls.append(name))
    return calls


def compare_calls(calls, it, gloo):
    everyone = logs.everyone(list(calls), gloo)
    calls.clear()
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            n = next((i for i, (a, b) in enumerate(zip(everyone[0], other)) if a != b),
                     min(len(everyone[0]), len(other)))
            raise BadInput(f"at it {it} rank {rank} calls nets in another order than rank 0, from call {n}: "
                           f"{other[n:n + 3]} against {everyone[0][n:n + 3]}; draw what decides it from "
                           f"common.shared_generator(seed, it)")


# ---- validation and samples --------------------------------------------------------------------------------

@contextlib.contextmanager
def judging(nets, emas):
    """Eval mode and no gradients; afterwards every module is in the mode it was."""
    modes = [(m, m.training) for net in [*nets.values(), *emas.values()] for m in net.modules()]
    for net in nets.values():
        net.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def validate(method, nets, cfg, dataset, done, rank, world, gloo, device, autocast, stopping):
    """{val/[setting/]phase/name: mean over batches and ranks}, or None if asked to stop in between. Calls
    step once per phase and batch, with its own seed."""
    meter = logs.Meter(gloo)
    for label, changes in startup.val_settings(cfg):
        its, it = {}, done
        while it < done + 1000 and it < done + cfg["max_iter"]:      # first turn of every phase from here on
            its.setdefault(method.phase(it, cfg), it)
            it += 1
        loader = data.Loader(dataset, cfg | dict(workers=0), 0, rank, world, cfg["accum"], cfg["seed"])
        for number in range(cfg["val_batches"]):
            for micro in range(cfg["accum"]):
                batch = encoders.encode(next(loader), cfg, device)
                for phase, at in its.items():
                    common.seed_default(common.hash_seed(cfg["seed"], "val", number, micro * world + rank))
                    with autocast():
                        loss, parts = startup.call(method, "step", nets, batch, at, cfg | changes)
                    for key, value in (dict(loss=loss) | parts).items():
                        meter.add(f"val/{label}{phase}/{key}", value)
            if stopping():
                loader.close()
                return None
        loader.close()
    return meter.flush()


def draw_samples(method, net, cfg, ids, labels, steps, seed, device, shape=None):
    """x0 (B, *shape) of samples `ids` (list of ints): sample i depends on (seed, i) and its label alone."""
    cond, uncond = encoders.conditions(labels, cfg, device)
    noise = common.noise_fn(seed, ids, shape or net.x_shape, device)
    return method.sample(net, noise, dict(cond=cond, uncond=uncond, id=torch.tensor(ids)), cfg, steps)


def draw_grid(method, net, cfg, device, rows=8):
    """Eight samples of each of the first ten classes, one class per column, always from the same noise."""
    columns = min(cfg["classes"], 10) or 8
    ids = list(range(rows * columns))
    labels = torch.tensor([i % columns if cfg["classes"] else -1 for i in ids])
    return draw_samples(method, net, cfg, ids, labels, cfg["steps"], cfg["seed"], device), columns


def close(gloo):
    """Leave together."""
    with resume.orphans_leave():
        if gloo is not None:
            dist.barrier(group=gloo)
            dist.destroy_process_group()
