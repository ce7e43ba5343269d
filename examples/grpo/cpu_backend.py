"""The torch backend for jobs whose tensors are on the CPU, as where there is no GPU."""

from __future__ import annotations

from tsliced.host.backends.torch import TorchBackend


class CpuTorchBackend(TorchBackend):
    """Goes by who registered, and believes what the ranks say: NVML sees nothing of them."""

    seen_by_nvml = False
