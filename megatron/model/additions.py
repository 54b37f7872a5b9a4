"""What a module must be so that it trains when it is added to a layer of the model.

An ordinary torch.nn module trains like our layers: its gradients join theirs
(parallel/layer_runner.py), its weights are drawn and lie in checkpoints by the module's name
(model/spec.py). What cannot do so is refused here, by name, when the model gets its storage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from megatron.model.gpt import GPTModel


def check_additions(model: GPTModel) -> None:
    """Raises ValueError that names what a run could not train, keep or repeat."""
    faults = [*_shared(model), *_undeclared(model), *_state(model)]
    if faults:
        raise ValueError(
            "\n  ".join(["modules in the model that cannot be trained as they are:", *faults])
        )


def _shared(model: GPTModel) -> Iterator[str]:
    """Shared parameters: a block belongs to one layer, and is gathered for it alone."""
    # A tied head is the embedding's matrix on purpose.
    tied = model.head is not None and model.head.weight
    users = Counter(
        parameter
        for _, unit in model.named_layers()
        for parameter in unit.parameters()
        if parameter is not tied
    )
    for name, parameter in model.named_parameters():
        if users[parameter] > 1:
            yield f"{name}: {users[parameter]} layers share it; give each its own"


def _undeclared(model: GPTModel) -> Iterator[str]:
    """Parameters that are not trained, that have no initial values, or of which nothing specifies
    how their gradients are summed; names that stand for another tensor.
    """
    holder: dict[str, str] = {}  # logical name -> parameter
    for name, parameter, spec in model.declared():
        if not parameter.requires_grad and spec.group != "state":
            yield f"{name}: requires_grad is False, but only whole units can be frozen (--freeze)"
        # Of an ordinary module matrices are drawn, scales are ones and biases zeros.
        is_usual = parameter.dim() == 2 or (
            parameter.dim() == 1 and name.rpartition(".")[2] in ("weight", "bias")
        )
        if not hasattr(parameter, "spec") and not is_usual:
            yield (
                f"{name} {list(parameter.shape)}: its initial values are not declared; "
                "make it a matrix, or a vector called weight (ones) or "
                "bias (zeros), or let its module declare it (megatron/model/spec.py)"
            )
        for tensor in spec.tensors:
            other = holder.setdefault(tensor.name, name)
            if other != name and tensor.copies != "tied":
                yield f"{name}: its name in checkpoints is that of {other} too; rename it"
            # Only the module's author knows whether ranks see the same values or parts of a sum.
            if model.tp.size > 1 and tensor.grad_sum is None:
                yield (
                    f"{name}: all tensor-parallel ranks hold it, and it is not declared how its "
                    "gradient is summed over them; call declare_grad_sum of "
                    "megatron/model/spec.py for its module: with parallel.tp.sequence where each "
                    "rank sees a part of the values (as between layers under --sequence-parallel), "
                    "with False where all see the same"
                )


def _state(model: GPTModel) -> Iterator[str]:
    """State that no checkpoint would hold, and random numbers that depend on the layout and on what
    was drawn before.
    """
    # Checkpoints hold parameters alone.
    for name, _ in model.named_buffers():
        yield (
            f"{name}: a buffer, which no checkpoint would hold; compute it from the "
            "micro-batch, or make it a parameter"
        )
    for name, module in model.named_modules():
        # torch's generators know neither the sample nor the position.
        if isinstance(module, _DropoutNd) and module.p > 0:
            yield (
                f"{name}: {module}: its mask would be another one in a recomputation and on "
                "other ranks; take megatron.model.dropout.Dropout"
            )
        elif isinstance(module, nn.RNNBase | nn.MultiheadAttention) and module.dropout > 0:
            yield (
                f"{name}: dropout {module.dropout:g} of {type(module).__name__}: its mask "
                "cannot be repeated; give it dropout=0"
            )
