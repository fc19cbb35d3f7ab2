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
    """From the FLOPs a token that training needed and executed, and both peaks in FLOPs a second.

    A share over 1 cannot be, and is none: the peak was measured on a busy machine, or is of another device.
    """
    return {
        "mfu": _share(tokens_per_second, needed, peak),
        "hfu": _share(tokens_per_second, executed, peak),
        "mfu_datasheet": _share(tokens_per_second, needed, datasheet),
        "matmul_peak_flops": peak,
    }


def _share(tokens_per_second: float | None, flops: float | None, peak: float | None) -> float | None:
    share = flops * tokens_per_second / peak if tokens_per_second and flops and peak else None
    return None if share is None or share > 1 else share
