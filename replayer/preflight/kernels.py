"""Rules for kernels of CUDA whose bits vary, as torch documents them.

https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html has two
lists. Operations of `REPLACED` get a deterministic kernel in deterministic mode; those of `RAISING`
have none, and raise. Neither happens in code that runs outside of deterministic mode, and a kernel
of Triton with atomics follows no mode.
"""

from collections.abc import Iterator

from replayer.preflight.source_files import Hit, Source, words

REPLACED = words(
    "index_add index_add_ scatter_add scatter_add_ scatter_reduce scatter_reduce_ index_put index_put_ index_copy "
    "index_copy_ repeat_interleave"
)
RAISING = words(
    "AvgPool3d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool2d FractionalMaxPool2d FractionalMaxPool3d "
    "MaxUnpool1d MaxUnpool2d MaxUnpool3d ReflectionPad1d ReflectionPad2d ReflectionPad3d NLLLoss CTCLoss "
    "avg_pool3d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d fractional_max_pool2d "
    "fractional_max_pool3d max_unpool1d max_unpool2d max_unpool3d interpolate nll_loss ctc_loss put_ histc bincount "
    "median grid_sample"
)
ATOMICS = ("tl.atomic_add", "triton.language.atomic_add", "atomicAdd")
OTHERS = ("numpy", "math", "statistics", "pandas", "scipy", "jax", "tensorflow")


def nondeterministic_kernels(source: Source, deterministic: bool) -> Iterator[Hit]:
    """Find calls of such operations, in files that import torch or Triton.

    Args:
        deterministic: whether the run is in deterministic mode.
    """
    libraries = {name.split(".")[0] for name in source.imported.values()}
    if not libraries & {"torch", "triton"}:
        return
    for call in source.calls:
        name = source.name_of(call)
        last = getattr(call.func, "attr", name)
        if name.split(".")[0] in OTHERS:
            continue
        if name.endswith("atomic_add") or name in ATOMICS:
            seen = "atomic_add adds in the order in which threads arrive"
            yield Hit(
                call,
                "kernel",
                "problem",
                seen,
                "sum in a fixed order: one program per output, or a second pass",
            )
        elif last in RAISING:
            seen = f"{last}() has no deterministic kernel on CUDA (backward included)"
            yield Hit(
                call,
                "kernel",
                "note",
                seen,
                "deterministic=true raises at it; compute it on the CPU, or otherwise",
            )
        elif last in REPLACED and not deterministic:
            seen = f"{last}() uses atomic adds on CUDA"
            yield Hit(call, "kernel", "note", seen, "deterministic=true chooses another kernel")
