"""The YAML's `compute:` section, applied to a model."""

from __future__ import annotations

import torch

from biphasic.config.errors import UserError
from biphasic.config.schema import ComputeConfig
from biphasic.model import attention, kernels
from biphasic.model.language_model import LanguageModel


def require_precision(precision: str) -> None:
    """Say in a line what Composer says in a traceback.

    Raises:
        UserError: this machine has no GPU, which `amp_bf16` needs.
    """
    if precision == "amp_bf16" and not torch.cuda.is_available():
        raise UserError("precision: amp_bf16 needs a GPU, and there is none here: precision=fp32 runs on CPUs")


def set_up(model: LanguageModel, config: ComputeConfig) -> str:
    """Choose attention and what is compiled, and describe the choice in a line. The numbers stay, within rounding.

    Raises:
        UserError: the requested attention isn't installed, or doesn't run on this machine.
    """
    gpu = torch.cuda.is_available()
    if config.attention != "auto" and not attention.installed(config.attention):
        wants = "needs a GPU" if not gpu else "doesn't run on this GPU"
        if gpu and config.attention == "flash2":
            wants = "needs flash-attn, which isn't installed (uv pip install --no-build-isolation '.[flash-attn]')"
        raise UserError(f"compute.attention: {config.attention} {wants}: expected another one, or auto")
    model.attention = config.attention
    compiling = gpu if config.compile == "auto" else config.compile
    model.compiled_loss = compiling
    if compiling:
        kernels.compile_layers(model.backbone)
    kernels.recompute_layers(model.backbone, config.recomputed(len(model.backbone.layers)))  # pyright: ignore
    recomputed = kernels.recomputed(model.backbone)
    again = f" ({recomputed} of {len(model.backbone.layers)} layers recomputed)" if recomputed else ""  # pyright: ignore
    flash = f" ({attention.activate_flash_kernels()})" if gpu and config.attention in ("auto", "varlen") else ""
    return f"layers and loss {'compiled' if compiling else 'not compiled'}{again}, attention {config.attention}{flash}"
