"""The YAML's `compute:` section, applied to a model."""

from __future__ import annotations

import torch

from biphasic.config.errors import UserError
from biphasic.config.schema import ComputeConfig
from biphasic.model import attention, kernels, losses
from biphasic.model.language_model import LanguageModel

_PACKAGES = {"flash2": "flash-attn", "flash3": "flash-attn-3"}


def require_precision(precision: str) -> None:
    """Say in a line what Composer says in a traceback.

    Raises:
        UserError: this machine has no GPU, which `amp_bf16` needs.
    """
    if precision == "amp_bf16" and not torch.cuda.is_available():
        raise UserError("precision: amp_bf16 needs a GPU, and there is none here: precision=fp32 runs on CPUs")


def set_up(model: LanguageModel, config: ComputeConfig) -> str:
    """Choose attention, loss and layers, and say what was chosen. Nothing that is computed changes, beyond rounding.

    Raises:
        UserError: something that was asked for isn't installed, or doesn't run on this machine.
    """
    gpu, installed = torch.cuda.is_available(), kernels.liger_installed()
    if config.attention != "auto" and not attention.installed(config.attention):
        package = _PACKAGES.get(config.attention)
        wants = "needs a GPU of this kind" if package is None or not gpu else f"needs {package}, which isn't installed"
        raise UserError(f"compute.attention: {config.attention} {wants}: expected another one, or auto")
    for key in ("loss", "layers"):
        if getattr(config, key) == "liger" and not installed:
            raise UserError(
                f"compute.{key}: liger needs a GPU and liger-kernel (pip install 'biphasic[gpu]'): expected auto"
            )
    compiling = gpu if config.compile == "auto" else config.compile
    liger = config.layers == "liger" or (config.layers == "auto" and not compiling and installed)
    model.attention = config.attention
    try:
        model.loss_kernel = losses.choose_kernel(config.loss, compiling, model.softcap, installed)
    except ValueError as error:
        raise UserError(f"compute.loss: {error}: expected auto") from None
    if liger:
        try:
            kernels.use_liger(model.backbone)
        except ValueError as error:
            if config.layers == "liger":
                raise UserError(f"compute.layers: {error}: expected auto or plain") from None
            liger = False
    kernels.recompute_layers(model.backbone, config.recomputed(len(model.backbone.layers)))  # pyright: ignore
    if compiling:
        kernels.compile_layers(model.backbone)
    layers = "compiled" if compiling else "liger-kernel's" if liger else "plain"
    again = kernels.recomputed(model.backbone)
    return f"layers {layers}{f' ({again} computed again)' if again else ''}, attention {model.attention}, " \
           f"loss {model.loss_kernel}"  # fmt: skip
