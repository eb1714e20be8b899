"""Reports made up for tests of how they are shown: real rungs, real sizes, numbers as such models give them."""

import numpy as np

from unified_ddp.equivalence.reporting import Report
from unified_ddp.equivalence.results import (
    BucketRow,
    BucketTime,
    Curve,
    Finding,
    Measure,
    NotTested,
    Rung,
    SideInfo,
    Verdict,
)

EPS = {"float32": 2.0**-23, "float64": 2.0**-52, "bfloat16": 2.0**-7}

TENSORS = {
    "conv1.weight": ("conv1.kernel", 864),
    "conv1.bias": ("conv1.bias", 32),
    "bn1.weight": ("bn1.scale", 32),
    "bn1.bias": ("bn1.bias", 32),
    "encoder.layers.0.self_attn.in_proj_weight": ("encoder.layers_0.self_attn.query.kernel", 49152),
    "encoder.layers.0.self_attn.in_proj_bias": ("encoder.layers_0.self_attn.query.bias", 384),
    "encoder.layers.0.self_attn.out_proj.weight": ("encoder.layers_0.self_attn.out.kernel", 16384),
    "encoder.layers.0.self_attn.out_proj.bias": ("encoder.layers_0.self_attn.out.bias", 128),
    "encoder.layers.0.linear1.weight": ("encoder.layers_0.linear1.kernel", 65536),
    "encoder.layers.0.linear1.bias": ("encoder.layers_0.linear1.bias", 512),
    "encoder.layers.0.linear2.weight": ("encoder.layers_0.linear2.kernel", 65536),
    "encoder.layers.0.linear2.bias": ("encoder.layers_0.linear2.bias", 128),
    "fc.weight": ("fc.kernel", 1280),
    "fc.bias": ("fc.bias", 10),
}

SIDES = (
    SideInfo(
        "torch",
        {"torch": "2.13.0+cpu", "unified_ddp": "0.1.0"},
        {"float32 matmul precision": "highest", "TF32 in cuDNN": "True", "mode": "training"},
        ("cpu",),
        sum(size for _, size in TENSORS.values()),
        len(TENSORS),
    ),
    SideInfo(
        "jax",
        {"jax": "0.10.2", "flax": "0.12.8", "optax": "0.2.8", "unified_ddp": "0.1.0"},
        {"default matmul precision": "default", "x64": "False", "XLA_FLAGS": ""},
        ("TFRT_CPU_0",),
        sum(size for _, size in TENSORS.values()),
        len(TENSORS),
    ),
)


def measure(random, dtype, size, excess, scale=0.5):
    tolerance = 30 * EPS[dtype] * scale
    ulp = max(excess * 30, 1e-3)
    spread = np.abs(random.standard_normal(min(size, 20000))) * ulp / 4
    bins = np.where(spread < 1, 0, np.minimum(np.floor(np.log2(np.maximum(spread, 1))) + 1, 56)).astype(int)
    return Measure(
        dtype=dtype,
        difference=excess * tolerance,
        tolerance=tolerance,
        excess=excess,
        noise=(tolerance / 16, tolerance / 20),
        scale=scale,
        max_ulp=float(spread.max()),
        relative_l2=excess * tolerance / 4,
        share_over=float(np.mean(spread > 30)),
        where=(int(random.integers(0, 8)), int(random.integers(0, 8))),
        ulp_counts=tuple(int(n) for n in np.bincount(bins)),
    )


def finding(random, rung, name, kind, dtype, verdict=Verdict.PASS, excess=None, **more):
    counterpart, size = TENSORS.get(name, (name, 640))
    excess = float(random.uniform(0.02, 0.4)) if excess is None else excess
    good64 = verdict in (Verdict.PASS, Verdict.ZERO, Verdict.PRECISION)
    return Finding(
        rung,
        name,
        (counterpart,),
        kind,
        verdict,
        measure(random, dtype, size, excess),
        measure(random, "float64", size, float(random.uniform(0.001, 0.1)) if good64 else excess * 1e5),
        **more,
    )


def buckets():
    rows, names = [], list(TENSORS)[::-1]
    for index, chosen in enumerate((names[:4], names[4:8], names[8:10], names[10:])):
        sizes = tuple(4 * TENSORS[n][1] for n in chosen)
        rows.append(BucketRow(index, tuple(chosen), tuple(TENSORS[n][0] for n in chosen), sum(sizes), sizes))
    return tuple(rows)


def timeline(random, ranks):
    rows = []
    for side, slow in (("torch", 1.0), ("jax", 0.6)):
        for rank in range(ranks):
            ready = 0.0
            for bucket in range(4):
                ready += slow * float(random.uniform(0.001, 0.002))
                rows.append(BucketTime(side, rank, bucket, ready, ready + slow * float(random.uniform(0.0008, 0.002))))
    return tuple(rows)


def curve(random, steps, off=0.0):
    base = 2.3 * np.exp(-np.arange(steps) / 9) + 0.02 * random.standard_normal(steps)
    width = 1e-3 * np.exp(np.arange(steps) / 6)
    second = base + width * random.uniform(-0.5, 0.5, steps) + off * np.arange(steps) * width
    return Curve(*(tuple(map(float, c)) for c in (base, second, base - width, base + width)))


def bucket_of(name):
    return next(row.index for row in buckets() if name in row.names)


def make_report(dtype="float32", until="curve", bad=None, seed=0, ranks=2, steps=20):
    """Returns a report; `bad` has verdict and excess by (rung, name), and later rungs are consequences."""
    random = np.random.default_rng(seed)
    bad = bad or {}
    broken = False
    rungs = []
    for rung in ("outputs", "loss", "buffers", "gradients", "reduced", "update", "steps", "curve"):
        findings = []
        names = {
            "outputs": ["logits"],
            "loss": ["loss"],
            "curve": ["loss"],
            "buffers": ["bn1.running_mean", "bn1.running_var"],
        }
        kinds = {
            "outputs": "output",
            "loss": "loss",
            "curve": "loss",
            "buffers": "buffer",
            "update": "parameter",
            "steps": "parameter",
        }
        for name in names.get(rung, TENSORS):
            verdict, excess = bad.get((rung, name), (None, None))
            if verdict is None:
                if broken:
                    verdict, excess = Verdict.CONSEQUENCE, float(random.uniform(2, 900))
                elif name == "conv1.bias" and rung in ("gradients", "reduced"):
                    verdict, excess = Verdict.ZERO, 0.3
                else:
                    verdict = Verdict.PASS
            places = [{"step": s} for s in range({"steps": min(steps, 8), "gradients": 2}.get(rung, 1))]
            if rung == "reduced":
                places = [
                    {"side": s, "rank": r, "bucket": bucket_of(name)} for s in ("torch", "jax") for r in range(ranks)
                ]
            if rung == "gradients":
                places = [{**p, "bucket": bucket_of(name)} for p in places]
            findings += [
                finding(random, rung, name, kinds.get(rung, "gradient"), dtype, verdict, excess, **p) for p in places
            ]
        broken = broken or any(
            r == rung and v in (Verdict.DIFFERS, Verdict.PRECISION) for (r, _), (v, _) in bad.items()
        )
        rungs.append(Rung(rung, tuple(findings), float(random.uniform(0.1, 2.0))))
        if rung == until:
            break
    return Report(
        rungs=tuple(rungs),
        sides=SIDES,
        dtype=dtype,
        until=until,
        ranks=ranks,
        steps=steps,
        seed=0,
        weights="scrambled",
        mapping={second: f"{name} | permute 1 0" for name, (second, _) in TENSORS.items()},
        not_tested=(
            NotTested(
                "conv1.bias", ("conv1.bias",), "its gradient is zero within rounding: batch norm takes it off again"
            ),
            NotTested(
                "encoder.layers.0.linear2.bias", ("encoder.layers_0.linear2.bias",), "no rung noticed a change of 1 %"
            ),
        ),
        notes=("the JAX side computes in float32 inside: float64 arbitrates up to 1e-7 only",)
        if dtype != "float32"
        else (),
        buckets=buckets() if until not in ("outputs", "loss", "buffers", "gradients") else (),
        timeline=timeline(random, ranks) if until not in ("outputs", "loss", "buffers", "gradients") else (),
        curve=curve(random, steps, 3.0 if broken else 0.0) if until == "curve" else None,
        seconds=12.3,
    )


ALL_GRADIENTS = {("gradients", name): (Verdict.DIFFERS, 3e4) for name in TENSORS}

REPORTS = {
    "pass": make_report(),
    "precision": make_report(
        until="reduced",
        bad={("gradients", n): (Verdict.PRECISION, 3.4) for n in ("fc.weight", "encoder.layers.0.linear1.weight")},
    ),
    "gradients": make_report(
        bad={
            ("gradients", "encoder.layers.0.self_attn.in_proj_weight"): (Verdict.DIFFERS, 1.24e4),
            ("gradients", "encoder.layers.0.self_attn.in_proj_bias"): (Verdict.DIFFERS, 5.6e3),
            ("gradients", "bn1.weight"): (Verdict.DIFFERS, float("inf")),
        }
    ),
    "reduced": make_report(until="reduced", bad={("reduced", n): (Verdict.DIFFERS, 4e6) for n in buckets()[1].names}),
    "bf16": make_report(dtype="bfloat16", until="gradients", seed=3),
    "scaled": make_report(until="gradients", bad=ALL_GRADIENTS),
}
