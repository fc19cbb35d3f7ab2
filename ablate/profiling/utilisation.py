"""How much of a device training used: FLOPs done a second by those that the device can do.

MFU (model FLOPs utilisation; Chowdhery et al., PaLM, 2022, arXiv:2204.02311, appendix B) counts the FLOPs that the
model needs: three forward passes a token by the formula of `ablate.cost`, causal attention as it is needed, nothing
computed twice. HFU (hardware FLOPs utilisation, ibid.) counts those that were executed: the operators of a forward and
a backward pass, with what a kernel computes again, and with hidden keys unless the kernel skips them. So MFU compares
architectures and HFU kernels.

Both are of the matmul peak that was measured on this very device, with the same threads and precision (see
`ablate.profiling.calibrate`); `mfu_datasheet` is MFU of the dense peak that the maker promises. None where a part is
unknown.
"""

from __future__ import annotations


def columns(
    tokens_per_second: float | None,
    needed: float | None,
    executed: float | None,
    peak: float | None,
    datasheet: float | None,
) -> dict[str, float | None]:
    """From the FLOPs a token that training needed and executed, and both peaks in FLOPs a second."""
    return {
        "mfu": _share(tokens_per_second, needed, peak),
        "hfu": _share(tokens_per_second, executed, peak),
        "mfu_datasheet": _share(tokens_per_second, needed, datasheet),
        "matmul_peak_flops": peak,
    }


def impossible(columns: dict[str, float | None]) -> list[str]:
    """Shares over 1, each with what speaks against it."""
    return [
        f"{name} of {value:.0%} cannot be: the peak was measured on a busy machine, or of another device "
        "(`ablate doctor` measures it anew)"
        for name, value in columns.items()
        if name in ("mfu", "hfu", "mfu_datasheet") and value is not None and value > 1
    ]


def _share(tokens_per_second: float | None, flops: float | None, peak: float | None) -> float | None:
    return flops * tokens_per_second / peak if tokens_per_second and flops and peak else None
