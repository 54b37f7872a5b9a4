"""Update rules on flat segments: AdamW (torch's fused kernel, torch's plain loop, NVIDIA apex) and SGD with momentum."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megatron.config.groups import OptimizerConfig


def find_apex() -> str | None:
    """None when NVIDIA's apex with its fused Adam is importable, else why not (PyPI's `apex` is another package)."""
    try:
        importlib.import_module("amp_C").multi_tensor_adam
        importlib.import_module("apex.optimizers").FusedAdam
    except ModuleNotFoundError as error:
        return f"module {error.name} is missing"
    except AttributeError as error:
        return f"not NVIDIA's apex: {error}"
    return None


def choose_adam(config: OptimizerConfig, device: torch.device) -> str:
    """The AdamW implementation: apex on a GPU that has it, else torch's fused kernel, unless the flag says otherwise."""
    choice, missing = config.adam_implementation, find_apex()
    if choice == "apex" and (missing or device.type != "cuda"):
        raise ValueError(f"--adam-implementation apex: {missing or 'it needs a GPU'}; drop the flag to take torch's fused AdamW")
    if choice == "auto":
        return "apex" if device.type == "cuda" and not missing else "torch-fused"
    return choice


@dataclass(frozen=True)
class UpdateRule:
    """How one step changes parameters; `state_names` are the buffers it keeps beside each segment."""

    config: OptimizerConfig
    implementation: str  # torch-fused, torch, apex

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq") if self.config.optimizer == "adam" else ("momentum_buffer",)

    @property
    def skips_on_device(self) -> bool:
        """Whether a found_inf word on the device suppresses the step, without the host having to look."""
        return self.implementation == "torch-fused"

    def apply(self, params: Sequence[Tensor], grads: Sequence[Tensor], states: dict[str, Sequence[Tensor]], step: Tensor, *, lr: float,
              weight_decay: float, coefficient: Tensor, found_inf: Tensor) -> None:
        """One step in place on lists of flat segments. Gradients are multiplied by `coefficient` (scalar of their dtype) first; `step` (fp32
        scalar) counts the steps taken before and is advanced by the caller; found_inf 1 leaves everything as it is when skips_on_device.
        """
        fused = self.implementation == "torch-fused"
        folds = fused and self.config.optimizer == "adam" and coefficient.dtype == torch.float32  # the kernel reads an fp32 word
        if not folds:
            torch._foreach_mul_(list(grads), coefficient)
        if self.config.optimizer == "sgd":
            sgd(params, grads, list(states["momentum_buffer"]), fused=fused, foreach=False if not fused else None, weight_decay=weight_decay,
                momentum=self.config.sgd_momentum, lr=lr, dampening=0.0, nesterov=False, maximize=False, found_inf=found_inf if fused else None)
            return
        beta1, beta2, eps = self.config.adam_beta1, self.config.adam_beta2, self.config.adam_eps
        if self.implementation == "apex":
            self._apex(params, grads, states, step, lr, weight_decay)
            return
        steps = [step.clone() for _ in params]  # torch advances one counter per tensor
        folded = {"grad_scale": 1 / coefficient if folds else None, "found_inf": found_inf} if fused else {}
        adamw(list(params), list(grads), list(states["exp_avg"]), list(states["exp_avg_sq"]), [], steps, fused=fused,
              foreach=None if fused else False, amsgrad=False, beta1=beta1, beta2=beta2, lr=lr, weight_decay=weight_decay, eps=eps,
              maximize=False, **folded)

    def _apex(self, params, grads, states, step, lr, weight_decay) -> None:  # never run: no machine with apex was at hand
        amp_c, applier = importlib.import_module("amp_C"), importlib.import_module("apex.multi_tensor_apply").multi_tensor_applier
        overflow = torch.zeros(1, dtype=torch.int, device=params[0].device)
        lists = [list(grads), list(params), list(states["exp_avg"]), list(states["exp_avg_sq"])]
        applier(amp_c.multi_tensor_adam, overflow, lists, lr, self.config.adam_beta1, self.config.adam_beta2, self.config.adam_eps,
                int(step.item()) + 1, 1, True, weight_decay)
