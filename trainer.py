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
import memory
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
    data_scale=1.0,          # of latents in .npy and .npz: 0.18215 for raw ones of Stable Diffusion's VAE
    data_keys=(),            # tars: kind=member;other, e.g. image=jpg,caption=txt; "" = the usual ones
    data_uncond="",          # tars: file of the negative embedding; "" = their uncond.safetensors, if any
    data_ignore="",          # tars: a file of keys, one a line, that are left out; "" = none
    data_filter=(),          # tars: tests of the member json, e.g. aesthetic>=5.5; "" = none
    encoders="",             # folder or hub id of a diffusers pipeline or VAE; "" = data in the net's space
    encoder_dtype="bf16",    # type of VAE and text encoders: bf16, "" = float32
    encoder_offload=False,   # keep them in host memory while they are idle
    offline=False,           # never ask the hub; what it gave before is used
    negative_prompt="",      # what guidance leads away from, or neg_prompt_wan, _cosmos; "" = the pipeline's
    data_fps=0.0,            # of raw videos: frames are taken at this rate; 0 = every frame
    given_frames=0,          # first latent frames of a clip that a video2world net is given; 0 = none
    depth_model="",          # depth estimation of transformers, which makes VACE's control; "" = stored
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
    plan = startup.plan(method, cfg, world, local, defaults)
    device, nets, trainable, folder = plan.device, plan.nets, plan.trainable, plan.folder
    found = startup.check_folder(method, cfg, folder)
    pins = None if found or rank else startup.pin_sources(cfg, nets, plan.inits, None)
    if dry_run:
        print(logs.describe(cfg, changed, plan, world))
        return print(memory.line(*memory.per_rank(method, cfg, nets, world)))
    files.make(folder, "set FEWSTEP_OUTPUT_ROOT to another place")

    # ---- process group, the folder's lock, the checkpoint to continue from
    watchdog = watch.Watchdog(cfg["timeout_s"], rank)
    watchdog.mark(0, "", "joining the other ranks")
    gloo, mesh = startup.join(cfg, world, device)
    say = logs.Printer(cfg["log_level"], rank, cfg["max_iter"])
    lock = on_rank0(lambda: startup.take_lock(folder), gloo)            # held until this process ends
    start, state = startup.newest(method, cfg, folder, plan.fingerprint, gloo, say)
    if state or from_rank0(found, gloo):
        pins = on_rank0(lambda: startup.pin_sources(cfg, nets, plan.inits, state), gloo)
    sources, held = ckpt.shared(pins, gloo).values()
    last = min(cfg["stop_at"] or cfg["max_iter"], cfg["max_iter"])
    if start >= last:
        say.warn(f"nothing to do: {folder} has done {start} iterations, {last} are asked for")
        return close(gloo)
    watchdog.mark(start, "", "start-up")

    # ---- nets, averages, optimizers
    averages = {common.parse_ema(entry)[0]: entry for entry in cfg["ema"]}
    emas = startup.fill_nets(cfg, plan, averages, held, state, mesh)
    tracked = averaged(nets["student"], trainable["student"])
    tracking = {name: averaged(ema, trainable["student"]) for name, ema in emas.items()}
    del held, pins
    opts = method.optimizers(nets, cfg)
    for opt in opts.values():
        shard.split_groups(opt)
    names = {p: f"{n}.{k}" for n, net in nets.items() for k, p in net.named_parameters()}
    owned = {phase: [p for g in opt.param_groups for p in g["params"]] for phase, opt in opts.items()}
    owners = {phase: sorted({names[p].split(".")[0] for p in params}) for phase, params in owned.items()}
    rates = {phase: [g["lr"] for g in opt.param_groups] for phase, opt in opts.items()}
    scaler = torch.amp.GradScaler(device.type, enabled=cfg["amp"] == "fp16", init_scale=2.0 ** 16)
    counts, skipped = ({phase: state[key].get(phase, 0) if state else 0 for phase in opts}
                       for key in ("counts", "skipped"))
    if state:
        fill.take_moments(opts, names, state["optims"], device)
        if state["scaler"] and scaler.is_enabled():
            scaler.load_state_dict(state["scaler"])

    # ---- run folder, logs, data
    if rank == 0:
        startup.open_folder(method, cfg, folder, sources, state, start, say)
    say(logs.describe(cfg, changed, plan, world, start, opts, owners))
    for line in logs.warnings(cfg, plan, opts, sources):
        say.warn(line)
    record = logs.Recorder(folder, logs.start_wandb(cfg, folder, say) if rank == 0 else None, rank, gloo, say)
    meter = logs.Meter(gloo)
    loader = data.Loader(plan.dataset, cfg, start, rank, world, cfg["accum"], cfg["seed"])
    anomaly = watch.Anomaly(nets if cfg["anomaly"] else {})
    profile = watch.Profile(cfg, folder, rank, device, say)
    calls = watch.count_calls(nets) if cfg["debug_calls"] else []
    saver = ckpt.Saver(folder / "checkpoints", cfg, start if state else -1, rank, gloo, mesh, say)
    state = None                                        # frees what a resume has read

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
            skipped=dict(skipped), sources=sources, data=plan.fingerprint, scaler=scaler.state_dict(),
            nets={n: fill.saved_state(n, net, trainable[n])
                  for n, net in nets.items() if trainable[n] or not list(net.parameters())},
            emas={n: fill.saved_state(n, ema, trainable["student"]) for n, ema in emas.items()},
            optims={p: fill.saved_moments(opt, names) for p, opt in opts.items()})

    def checkpoint(done, wait=False):
        """Write N.pth, once, on a full disk too; every rank learns if that worked."""
        watchdog.mark(done, "", "saving a checkpoint")
        for name in fill.uneven_buffers(nets, gloo) if saver.saved != done else ():
            say.warn(f"WARNING: buffer {name} is not the same on every rank; see common.all_mean")
        saver.save(done, lambda: content(done), wait)

    def look(done, at_start=False):
        """Validation and sample grid where due (at the start: those an interrupted run still owes)."""
        due = lambda every: every and (done % every == 0 or done == cfg["max_iter"])            # noqa: E731
        watchdog.mark(done, "", "validation")
        if due(cfg["val_every"]) and not (at_start and record.has(done, "val/")):
            values = judge.validate(method, nets, cfg, plan.val_set, done, rank, world, gloo, device,
                                    lambda: watchdog.mark(done, "", "validation") or stopping())
            if values is None:
                return
            record(done, values)
            say(f"it {done:07d} | " + " ".join(f"{k} {v:.4g}" for k, v in values.items()))
        watchdog.mark(done, "", "samples")
        grid = folder / "samples" / f"{done:07d}.png"
        if due(cfg["sample_every"]) and not (at_start and from_rank0(rank == 0 and files.exists(grid), gloo)):
            net = next(iter(emas.values()), nets["student"])
            x0, columns = judge.draw_grid(method, net, cfg, device, rank, world, gloo, plan.val_set)
            if not cfg["reshard"]:
                shard.reshard([net, *nets.values()])
            if rank == 0:
                record.picture(done, encoders.decode(x0, cfg), grid, columns)

    # ---- the loop
    if device.type == "cpu" and mesh is None:
        shard.keep_freed(2 ** 25)
    look(start, at_start=True)
    done, previous = start, None
    if stopping():
        checkpoint(start, wait=True)
    try:
        while done < last and not stopping():
            it, began = done, time.perf_counter()
            phase = method.phase(it, cfg)
            opt, params, losses = opts[phase], owned[phase], []
            of = "" if phase == "student" else f"_{phase}"
            profile.begin(it, phase)
            if phase != previous:
                shard.turn_to(phase, owned, nets)
                previous = phase
            for micro in range(cfg["accum"]):
                watchdog.mark(it, phase, "waiting for data")
                waited = time.perf_counter()
                raw = next(loader)
                meter.add(dict(data_ms=(time.perf_counter() - waited) * 1e3 * cfg["accum"]))
                common.seed_default(common.hash_seed(cfg["seed"], it, micro * world + rank))
                batch = encoders.encode(raw, cfg, device)
                watchdog.mark(it, phase, "step")
                anomaly.start(first=micro == 0)
                loss, values = startup.call(method, nets, batch, it, cfg)
                scaler.scale(loss / cfg["accum"]).backward()
                anomaly.stop()
                losses.append(values)
                meter.add({f"loss{of}" if k == "loss" else k: v for k, v in values.items()})
                if cfg["debug_calls"]:
                    watch.compare_calls(calls, it, gloo)
            if not cfg["reshard"]:
                shard.reshard(nets.values())
            average_gradients(params, world)
            norm = clip(params, cfg["clip"], scaler, mesh, device)      # the iteration's one device sync
            if norm < float("inf"):
                factor = common.lr_factor(cfg["lr_schedule"], counts[phase], cfg["warmup"], plan.turns[phase])
                for group, rate in zip(opt.param_groups, rates[phase]):
                    group["lr"] = rate * factor
                done = None                             # till EMAs have moved, the weights are no iteration's
                opt.step()
                counts[phase], skipped[phase] = counts[phase] + 1, 0
                startup.post_step(nets[name] for name in owners[phase])
                for name, entry in averages.items() if phase == "student" else ():
                    beta = common.ema_beta(entry, counts[phase], cfg["batch_size"])
                    update_ema(tracking[name], tracked, beta)
                meter.add({f"norm{of}": norm, f"lr{of}": opt.param_groups[0]["lr"]})
            else:                                       # what is not finite never reaches the weights
                skipped[phase] += 1
                meter.add(dict(skipped=1.0))
                why = watch.blame(losses, gloo, anomaly.found)
                if skipped[phase] == 1:
                    say.warn(f"update left out at it {it}, phase {phase!r}: the gradient was not finite "
                             f"({why})")
            scaler.update()
            opt.zero_grad(set_to_none=True)
            done = it + 1
            if 0 < cfg["max_skipped"] <= skipped[phase]:
                checkpoint(done, wait=True)
                raise BadInput(f"the gradient was not finite {skipped[phase]} times in a row, last at it "
                               f"{it}, phase {phase!r} ({why}); --amp \"\" runs in float32, a lower --lr or "
                               f"--clip may help")
            meter.add(dict(ms_per_it=(time.perf_counter() - began) * 1e3))
            profile.end()
            if cfg["log_every"] and (done % cfg["log_every"] == 0 or done == last):
                values = logs.with_rates(meter.flush(), cfg["batch_size"], last - done, device)
                values |= dict(scale=scaler.get_scale()) if scaler.is_enabled() else {}
                record(done, values)
                say(logs.log_line(done, cfg["max_iter"], values))
            say.progress(done)
            if done == last or (cfg["save_every"] and done % cfg["save_every"] == 0):
                checkpoint(done)
            look(done)                                  # after the save: what fails here costs nothing
    except Exception:                                   # nothing collective here: the others may have left
        saver.wait()
        if rank == 0 and mesh is None and done not in (None, saver.saved, start):   # start: nothing is gained
            with contextlib.suppress(BadInput):         # the first sentence is the one that counts
                ckpt.save(file := ckpt.path(folder / "checkpoints", done), ckpt.split(content(done))[0])
                say.warn(f"{done} iterations are in {file}")
        raise
    finally:
        profile.close()

    # ---- the end: finished, stopped by --stop_at, or asked to leave
    checkpoint(done, wait=True)
    loader.close()
    say.warn(logs.ending(cfg, plan, done, last))
    if done < last and rank == 0:
        resume.scheduler.request_resume()
    watchdog.mark(done, "", "leaving")
    say.progress(None)
    record.report(lambda wandb: wandb.finish())
    if lock:
        lock.close()
    close(gloo)
    watchdog.stop()


# ---- one iteration -----------------------------------------------------------------------------------------

def average_gradients(params, world):
    """Mean over the ranks, in place, of what is not sharded (FSDP2 has averaged that). A parameter without
    gradient on every rank keeps None (AdamW would decay it); one without on some counts as zero there. Which
    have one travels with the gradients, and is read only where one is missing."""
    params = [p for p in params if not shard.sharded(p)]
    if world == 1 or not params:
        return
    missing = [i for i, p in enumerate(params) if p.grad is None]
    has = torch.ones(len(params), device=params[0].device)
    for i in missing:
        params[i].grad, has[i] = torch.zeros_like(params[i]), 0.0
    parts = [has, *(p.grad for p in params)]
    flat = torch.cat([part.reshape(-1) for part in parts])
    dist.all_reduce(flat)
    means = flat.div_(world).split([part.numel() for part in parts])
    torch._foreach_copy_(parts, [mean.view_as(part) for mean, part in zip(means, parts)])
    for i, share in zip(missing, has[missing].tolist() if missing else ()):
        if not share:
            params[i].grad = None


def clip(params, limit, scaler, mesh, device):
    """Global norm of the gradients as a float. Takes the loss scale out of them, in place, and scales them to
    `limit` (0 = never) if it is finite and above. The scaler judges by the norm, alike on all ranks."""
    grads = [p.grad for p in params if p.grad is not None]
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


def averaged(net, trainable):
    """The tensors that update_ema works on, of the student or an average: trainable parameters, and buffers.
    Listed once: walking the modules takes longer than the update."""
    own = dict(net.named_parameters())
    return [shard.local(own[k]) for k in trainable], list(net.buffers())


@torch.no_grad()
def update_ema(ema, net, beta):
    """ema <- beta ema + (1 - beta) net; buffers are copied."""
    torch._foreach_lerp_(ema[0], net[0], 1.0 - beta)
    if ema[1]:
        torch._foreach_copy_(ema[1], net[1])


def close(gloo):
    """Leave together."""
    with resume.orphans_leave():
        if dist.is_initialized():
            dist.barrier(group=gloo)
            dist.destroy_process_group()
