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
import os
import shlex
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

import ckpt
import common
import data
import files
import fill
import judge
import logs
import resume
import shard
import startup
import watch
from common import BadInput, from_rank0, on_rank0
from nets import encoders

ROOT = Path(__file__).resolve().parent

defaults = dict(
    net="edm:digits",        # family:size[,option=value]: edm:cifar10, edm:imagenet64, edm:digits, toy:tiny
    data="digits",           # "digits" (embedded), a folder of images or pairs, a .zip, an .npz: data.py
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
    parallel="ddp",          # ddp: replicas; fsdp: every net sharded over the ranks (shard.py)
    shard_size=0,            # fsdp: ranks that share one copy of the nets, the groups are replicas; 0 = all
    reshard=True,            # fsdp: give up gathered weights between forward and backward pass
    offload=False,           # fsdp: weights, gradients and moments in host memory
    recompute=False,         # activation checkpointing of every block
    compile=False,           # torch.compile of every block
    ema=("ema",),            # student averages: name[:rate], name:power=0.05, name:half_kimg=500; "" = none
    resume="auto",           # auto: newest checkpoint; force: also other data or method file; "": none
    save_every=1000,         # iterations between checkpoints; 0 = only at the end
    keep_last=0,             # newest checkpoints that are kept; 0 = all
    async_save=False,        # write checkpoints in the background, from a copy in host memory
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
    timeout_s=1800,          # a rank without progress for so long says where it is and ends the run; 0 = off
    anomaly=False,           # name the module whose output or gradient is not finite; a sync per micro-step
    deterministic=False,     # deterministic kernels only; an operation that has none raises an error
    profile=(),              # first,last: a torch.profiler trace of these iterations; "" = none
)


def train(method, cfg, changed=(), dry_run=False):
    """Run a method to cfg["max_iter"]. `changed`: {key: default} of what preset and command line set. Bad
    input raises BadInput before the process group starts."""
    # ---- everything that can be wrong with the input
    rank, world, local = startup.ranks()
    startup.check(cfg, world, defaults)
    watch.profile_window(cfg)
    watch.deterministic(cfg["deterministic"])
    device = startup.pick_device(cfg, local)
    dataset = data.load(cfg)
    if cfg["classes"] < 0:
        cfg["classes"] = dataset.classes
    with torch.device("meta"):
        nets = startup.call(method, "build", cfg)
    startup.check_nets(method, cfg, nets)
    shape = tuple(nets["student"].x_shape)
    val_set = data.load(cfg, split="val") if cfg["val_every"] else dataset
    for key, some in ("data", dataset), ("val_data", val_set):
        if shape != tuple(some.shape):
            raise BadInput(f"--{key} {cfg[key]} has samples of shape {tuple(some.shape)}, --net {cfg['net']} "
                           f"takes {shape}; choose a net of that shape")
        for _, changes in startup.val_settings(cfg) if hasattr(method, "check") else ():
            method.check(some, nets, cfg | changes)
    trainable = {n: [k for k, p in net.named_parameters() if p.requires_grad] for n, net in nets.items()}
    inits, turns = startup.check_method(method, cfg, nets, trainable)
    startup.check_settings(method, cfg, nets, world, defaults)
    folder = startup.output_folder(cfg)
    found = startup.check_folder(method, cfg, folder)
    fingerprint = startup.fingerprint(cfg, dataset)
    hint = (f"make one with `torchrun train.py methods/sft.py --net {cfg['net']} --data {cfg['data']}`, or "
            f"give --teacher PATH[#ENTRY]") if not cfg.get("stage1") else (
            "run the first stage, or give --stage1 PATH[#ENTRY]")

    def pinned(state):
        """Rank 0 finds the sources of weights and opens those that `state` does not make superfluous."""
        kept = state["sources"] if state else {}
        sources = {s: kept.get(s) or ckpt.resolve(s, hint) for s in inits.values() if s not in nets}
        held = {s: ckpt.read(sources[s]) for s in fill.needed(nets, inits, state)}
        fill.check_sources(nets, inits, held)
        return dict(sources=sources, held=held)

    pins = None if found or rank else pinned(None)
    if dry_run:
        return logs.show_plan(method, cfg, changed, nets, trainable, world, folder)
    startup.make_folder(folder, f"output folder {folder} is not writable",
                        "set FEWSTEP_OUTPUT_ROOT to one that is", ("checkpoints", "samples"))

    # ---- process group: gloo for flags, the default back-end (NCCL on CUDA) for tensors
    gloo, limit = None, watch.group_timeout(cfg["timeout_s"])
    watchdog = watch.Watchdog(cfg["timeout_s"], rank, world)
    watchdog.mark(0, "", "joining the other ranks")
    if world > 1 or cfg["parallel"] == "fsdp":
        alone = {} if "MASTER_ADDR" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)
        with resume.orphans_leave():
            dist.init_process_group(timeout=limit, **alone)
            if world > 1:
                gloo = (dist.new_group(backend="gloo", timeout=limit) if device.type == "cuda"
                        else dist.group.WORLD)
    mesh = shard.make_mesh(cfg, world, device, limit)
    say = logs.Printer(cfg["log_level"], rank, cfg["max_iter"])
    lock = startup.take_lock(folder, rank, gloo)                # held until this process ends
    start, state, warn = 0, None, lambda text: say(text, "warning")                               # noqa: E731
    for it in ckpt.unfinished(folder / "checkpoints") if rank == 0 else ():
        warn(f"WARNING: {folder}/checkpoints/{it:07d}.* is of a save that did not finish; it is not used")
        if ckpt.scan(folder / "checkpoints"):
            ckpt.clear(folder / "checkpoints", [it])
    if from_rank0(on_rank0(lambda: startup.check_folder(method, cfg, folder), gloo), gloo):   # may be new
        start, state = ckpt.newest(folder / "checkpoints", warn, gloo)
        if start is None:
            raise BadInput(f"no checkpoint in {folder} can be read; remove them to start anew, or use "
                           f"--name NEW")
        on_rank0(lambda: startup.check_folder(method, cfg, folder, state, fingerprint), gloo)
    if from_rank0(bool(state) or found, gloo):
        pins = on_rank0(lambda: pinned(state), gloo)
    sources, held = ckpt.shared(pins, gloo).values()
    if start >= cfg["max_iter"] or 0 < cfg["stop_at"] <= start:
        key = "max_iter" if start >= cfg["max_iter"] else "stop_at"
        say(f"nothing to do: {folder} has done {start} iterations and {key} is {cfg[key]}", "warning")
        return close(gloo)
    last = min(cfg["stop_at"] or cfg["max_iter"], cfg["max_iter"])
    watchdog.mark(start, "", "start-up")

    # ---- nets and EMAs: copies, shards, weights
    ema_specs = {e: common.parse_ema(e) for e in cfg["ema"]}
    models = {name: copy.deepcopy(net) for name, net in nets.items()}          # stay on the meta device
    emas = {spec[0]: copy.deepcopy(nets["student"]).requires_grad_(False).eval()
            for spec in ema_specs.values()}
    for net in [*nets.values(), *emas.values()]:
        shard.wrap(net, cfg, mesh, device)
    fill.fill(nets, models, inits, held, state, trainable, cfg, device)
    if state is None:
        post_step(nets.values())
    for name, ema in emas.items():
        fill.copy_net(nets["student"], ema)
        if state and name in state["emas"]:
            fill.check(models["student"].state_dict(), state["emas"][name], f"{name} (checkpoint)",
                       keys=fill.saved_keys(models["student"], trainable["student"]))
            fill.take_all(ema, state["emas"][name], device)
    del models, held, pins

    # ---- optimizers
    opts = method.optimizers(nets, cfg)
    owned = {phase: [p for g in opt.param_groups for p in g["params"]] for phase, opt in opts.items()}
    names = {p: f"{n}.{k}" for n, net in nets.items() for k, p in net.named_parameters()}
    phase_nets = {phase: [net for n, net in nets.items() if any(names[p].startswith(n + ".") for p in params)]
                  for phase, params in owned.items()}
    for opt in opts.values():
        shard.split_groups(opt)
        for group in opt.param_groups:
            group["initial_lr"] = group["lr"]
    ema_tensors = {name: averaged(ema, nets["student"], trainable["student"]) for name, ema in emas.items()}
    scaler = torch.amp.GradScaler(device.type, enabled=cfg["amp"] == "fp16", init_scale=2.0 ** 16)
    counts, skipped = ({phase: 0 for phase in opts} for _ in range(2))
    if state:
        fill.take_moments(opts, names, state["optims"], device)
        for ours, kept in (counts, state["counts"]), (skipped, state["skipped"] or {}):
            ours |= {k: v for k, v in kept.items() if k in ours}
        if state["scaler"] and scaler.is_enabled():
            scaler.load_state_dict(state["scaler"])
    autocast = lambda: torch.autocast(  # noqa: E731
        device.type, shard.DTYPES.get(cfg["amp"]), enabled=bool(cfg["amp"]))
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
    anomaly = watch.Anomaly(nets if cfg["anomaly"] else {})
    profile = watch.Profile(cfg, folder, rank, device, say)
    calls = watch_calls(nets) if cfg["debug_calls"] and world > 1 else None
    saver = ckpt.Saver(folder / "checkpoints", cfg["keep_last"], cfg["async_save"], rank, gloo, mesh, warn)
    saved, state = (start if state else -1), None       # frees what a resume has read

    def stopping():
        """Was any rank asked to leave? Commits a save once the background has written it everywhere."""
        stop, busy = resume.agreed(gloo, resume.requested(), saver.busy())
        if not busy:
            saver.finish()
        return stop

    def content(done):
        """What a resume cannot recompute; of sharded tensors this rank's rows."""
        return dict(
            format=ckpt.FORMAT, it=done, method=method.path.stem, config=dict(cfg), counts=dict(counts),
            skipped=dict(skipped), sources=sources, data=fingerprint, scaler=scaler.state_dict(),
            nets={n: fill.saved_state(n, net, trainable[n])
                  for n, net in nets.items() if trainable[n] or not list(net.parameters())},
            emas={n: fill.saved_state(n, ema, trainable["student"]) for n, ema in emas.items()},
            optims={p: fill.saved_moments(opt, names) for p, opt in opts.items()})

    def checkpoint(done, wait=False):
        """Write N.pth; every rank learns if that worked."""
        nonlocal saved
        watchdog.mark(done, "", "saving a checkpoint")
        if saved != done:
            for name in fill.uneven_buffers(nets, gloo) if world > 1 else ():
                warn(f"WARNING: buffer {name} is not the same on every rank, only rank 0's is kept; average "
                     f"what it is made of with common.all_mean")
            saved = done                                # tried once, on a full disk too
            saver.save(done, lambda: content(done), wait)
        elif wait:
            saver.finish()

    def look(done, at_start=False):
        """Validation and sample grid where due (at the start: those an interrupted run still owes)."""
        watchdog.mark(done, "", "validation")
        due = lambda every: every and (done % every == 0 or done == cfg["max_iter"])         # noqa: E731
        if due(cfg["val_every"]) and not (at_start and record.has(done, "val/")):
            with judge.judging(nets.values()):
                values = judge.validate(method, nets, cfg, val_set, done, rank, world, gloo, device, autocast,
                                        lambda: watchdog.mark(done, "", "validation") or stopping())
            if values is None:
                return
            record(done, values)
            say(f"it {done:07d} | " + " ".join(f"{k} {v:.4g}" for k, v in values.items()))
        watchdog.mark(done, "", "samples")
        grid = folder / "samples" / f"{done:07d}.png"
        if due(cfg["sample_every"]) and not (at_start and from_rank0(rank == 0 and files.exists(grid), gloo)):
            net = next(iter(emas.values()), nets["student"])
            with judge.judging([net]), autocast():
                x0, columns = judge.draw_grid(method, net, cfg, device, rank, world, gloo)
            if not cfg["reshard"]:
                shard.reshard([net, *nets.values()])
            try:
                if rank == 0:
                    logs.save_grid(encoders.decode(x0, cfg), grid, columns)
                if wandb:
                    wandb.picture(grid, done)
            except BadInput as e:                       # a picture is not worth a run
                say(f"WARNING: {e}", "warning")

    # ---- the loop
    look(start, at_start=True)
    done, clock, busy, previous = start, 0.0, 0.0, None
    if stopping():
        checkpoint(start, wait=True)
    try:
        while done < last and not stopping():
            it, began = done, time.perf_counter()
            phase = method.phase(it, cfg)
            opt, params, own = opts[phase], owned[phase], []
            profile.begin(it, phase)
            if phase != previous:
                for other, ps in owned.items():
                    for p in ps:
                        p.requires_grad_(other == phase)
                shard.settle(nets.values())
                previous = phase
            for micro in range(cfg["accum"]):
                watchdog.mark(it, phase, "waiting for data")
                waited = time.perf_counter()
                raw = next(loader)
                meter.add("data_ms", (time.perf_counter() - waited) * 1e3 * cfg["accum"])
                common.seed_default(common.hash_seed(cfg["seed"], it, micro * world + rank))
                batch = encoders.encode(raw, cfg, device)
                watchdog.mark(it, phase, "step")
                anomaly.start(first=micro == 0)
                with autocast():
                    loss, parts = startup.call(method, "step", nets, batch, it, cfg)
                if not (torch.is_tensor(loss) and loss.requires_grad):
                    raise BadInput(f"{method.path}: step() at it {it} (phase {phase!r}) returned a loss that "
                                   f"depends on no parameter of that optimizer; is something under no_grad?")
                watchdog.mark(it, phase, "backward")
                scaler.scale(loss / cfg["accum"]).backward()
                anomaly.stop()
                own.append(watch.detached(loss, parts))
                suffix = "" if phase == "student" else f"_{phase}"
                meter.add(f"loss{suffix}", loss)
                for key, value in parts.items():
                    meter.add(key, value)
                if calls is not None:
                    compare_calls(calls, it, gloo)
            if not cfg["reshard"]:
                shard.reshard(nets.values())
            watchdog.mark(it, phase, "waiting for the other ranks")
            average_gradients(params, world)
            grads = [p.grad for p in params if p.grad is not None]
            norm = clip(grads, cfg["clip"], scaler, mesh, device)       # the iteration's one device sync
            watchdog.mark(it, phase, "update")
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
                why = watch.blame(own, gloo, anomaly.found)
                if skipped[phase] == 1:
                    say(f"update left out at it {it}, phase {phase!r}: the gradient was not finite ({why})",
                        "warning")
            scaler.update()
            opt.zero_grad(set_to_none=True)
            done = it + 1
            if 0 < cfg["max_skipped"] <= skipped[phase]:
                checkpoint(done, wait=True)
                raise BadInput(f"the gradient was not finite {skipped[phase]} times in a row, last at it "
                               f"{it}, phase {phase!r} ({why}); --amp \"\" runs in float32, a lower "
                               f"--lr or --clip may help")
            spent = time.perf_counter() - began
            busy, clock = busy + spent, clock + spent
            profile.end()

            if cfg["log_every"] and (done % cfg["log_every"] == 0 or done == last):
                n = min(done % cfg["log_every"] or cfg["log_every"], done - start)
                values = meter.flush() | dict(
                    ms_per_it=busy / n * 1e3, img_per_s=n * cfg["batch_size"] / busy,
                    mem_gb=logs.memory_gb(device), eta_s=(last - done) * clock / (done - start),
                    **watch.device_values(device))
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
        saver.wait()
        if rank == 0 and mesh is None and done not in (None, saved, start):     # a first one gained nothing
            with contextlib.suppress(BadInput):         # the first sentence is the one that counts
                saver.alone(done, content(done))
                say(f"{done} iterations are in {ckpt.path(folder / 'checkpoints', done)}", "warning")
        raise
    finally:
        profile.close()

    # ---- the end: finished, stopped by --stop_at, or asked to leave
    preempted = done < last
    checkpoint(done, wait=True)
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
        say(f"done: {file}\nsamples: {grid if cfg['sample_every'] else 'none'}", "warning")
        if fingerprint.get("pairs_of", cfg["data"]) == "digits":
            say(f"score it: python evaluate.py {shlex.quote(str(folder))}", "warning")
    watchdog.mark(done, "", "leaving")
    say.progress(None)
    if wandb:
        wandb.finish()
    lock.close()
    close(gloo)
    watchdog.stop()


# ---- one iteration -----------------------------------------------------------------------------------------

def average_gradients(params, world):
    """Mean over the ranks, in place, of what is not sharded (FSDP2 has averaged that). A parameter without
    gradient on every rank keeps None (AdamW would decay it); one without on some counts as zero there. Which
    have one travels with the gradients, and is read only where one is missing.
    Matches one process on the whole batch to rounding."""
    params = [p for p in params if not shard.sharded(p)]
    if world == 1 or not params:
        return
    missing = [i for i, p in enumerate(params) if p.grad is None]
    has = torch.ones(len(params), device=params[0].device)
    by_dtype = {has.dtype: [has]}
    for i in missing:
        params[i].grad, has[i] = torch.zeros_like(params[i]), 0.0
    for p in params:
        by_dtype.setdefault(p.grad.dtype, []).append(p.grad)
    for grads in by_dtype.values():
        flat = torch.cat([g.reshape(-1) for g in grads])
        dist.all_reduce(flat)
        flat /= world
        torch._foreach_copy_(grads, [f.view_as(g) for f, g in
                                     zip(flat.split([g.numel() for g in grads]), grads)])
    for i, share in zip(missing, has[missing].tolist() if missing else ()):
        if not share:
            params[i].grad = None


def clip(grads, limit, scaler, mesh, device):
    """Global norm as a float. Takes the loss scale out of the gradients, in place, and scales them to `limit`
    (0 = never) if the norm is finite and above. The scaler judges by the norm, alike on all ranks."""
    scaled, factor = shard.norm(grads, mesh, device), 1.0
    if scaler.is_enabled():
        judge = torch.zeros((), device=device)
        judge.grad = scaled.clone()
        scaler.unscale_(SimpleNamespace(param_groups=[dict(params=[judge])]))
        norm, before = torch.stack([judge.grad, scaled]).tolist()
        factor = norm / before if before else 1.0
    else:
        norm = scaled.item()
    if norm < float("inf"):
        factor *= limit / norm if 0 < limit < norm else 1.0
        if factor != 1.0:
            torch._foreach_mul_([shard.local(g) for g in grads], factor)
    return norm


def averaged(ema, net, trainable):
    """The tensors update_ema works on, listed once (walking the modules takes longer than the update): of the
    EMA and of the net, those that are averaged, and the buffers, which are copied."""
    own, other = dict(ema.named_parameters()), dict(net.named_parameters())
    return ([shard.local(own[k]) for k in trainable], [shard.local(other[k]) for k in trainable],
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
    everyone = common.everyone(list(calls), gloo)
    calls.clear()
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            n = next((i for i, (a, b) in enumerate(zip(everyone[0], other)) if a != b),
                     min(len(everyone[0]), len(other)))
            raise BadInput(f"at it {it} rank {rank} calls nets in another order than rank 0, from call {n}: "
                           f"{other[n:n + 3]} against {everyone[0][n:n + 3]}; draw what decides it from "
                           f"common.shared_generator(seed, it)")


def close(gloo):
    """Leave together."""
    with resume.orphans_leave():
        if gloo is not None:
            dist.barrier(group=gloo)
        if dist.is_initialized():
            dist.destroy_process_group()
