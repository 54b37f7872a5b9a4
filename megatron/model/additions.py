"""What a module must be so that it trains when it is added to a unit of the model.

An ordinary torch.nn module trains like our layers: its gradients join theirs (model/block.py), its weights are drawn by name (model/init.py)
and lie in checkpoints. What cannot do so is refused here, by name, when the model gets its storage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from megatron.layers import tensor_parallel
from megatron.layers.linear import Linear
from megatron.model.gpt import GPTModel
from megatron.model.layout import boxes

CUT = ("attention.qkv", "attention.proj", "mlp.fc1", "mlp.fc2")  # layers whose parameters layout.py cuts by their name


def check_additions(model: GPTModel) -> None:
    """Raises ValueError that names every parameter, buffer and module that a run could not train, keep or repeat."""
    faults = [*_shared(model), *_values(model), *_gradients(model), *_state(model)]
    if faults:
        raise ValueError("\n  ".join(["modules in the model that cannot be trained as they are:", *faults]))


def _shared(model: GPTModel) -> Iterator[str]:
    """A block of the optimizer is one unit's, and gathered for its passes alone."""
    tied = model.head is not None and model.head.weight
    users = Counter(parameter for _, unit in model.units() for parameter in unit.parameters() if parameter is not tied)
    for name, parameter in model.named_parameters():
        if users[parameter] > 1:
            yield f"{name}: {users[parameter]} layers share it; give each its own"


def _values(model: GPTModel) -> Iterator[str]:
    """What model/init.py has no rule for, and what is not trained."""
    for name, parameter in model.named_parameters():
        kind = name.rpartition(".")[2]
        if not parameter.requires_grad:
            yield f"{name}: requires_grad is False, but only whole units can be frozen (--freeze)"
        if parameter.dim() > 2 or parameter.dim() == 0 or parameter.dim() == 1 and kind not in ("weight", "bias"):
            yield (f"{name} {list(parameter.shape)}: there is no rule for its initial values; make it a matrix, or a vector called weight (ones) or "
                   "bias (zeros), or add a rule to megatron/model/init.py")


def _gradients(model: GPTModel) -> Iterator[str]:
    """Names that stand for another layout, and under tensor parallelism parameters of which nothing says how their gradients are summed."""
    holder: dict[str, str] = {}  # logical name -> parameter
    declared = (*(name for row in tensor_parallel.PARTIAL_GRADIENTS for name in row.names), *tensor_parallel.WHOLE_GRADIENTS)
    for path, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{kind}"
            if path.endswith(CUT) and not isinstance(module, Linear):
                yield f"{name}: {path.split('.', 2)[2]} is the name of a layer that is cut over ranks; call the module something else"
                continue
            held = boxes(model.config, model.vocab_size, name, parameter, model.tp)
            others = {holder.setdefault(box.name, name) for box in held} - {name}
            if others and not any(box.replicated == "tied" for box in held):
                yield f"{name}: its name in checkpoints is that of {others.pop()} too; call it something else"
            if any(box.replicated == "axis" and not box.name.endswith(declared) for box in held):
                yield (f"{name}: all tensor-parallel ranks hold it, and nothing says how its gradient is summed over them; name it in "
                       "megatron/layers/tensor_parallel.py: in PARTIAL_GRADIENTS where each rank sees a part of the values (as between layers under "
                       "--sequence-parallel), in WHOLE_GRADIENTS where all see the same")


def _state(model: GPTModel) -> Iterator[str]:
    """State that no checkpoint would hold, and random numbers that depend on the layout and on what was drawn before."""
    for name, _ in model.named_buffers():
        yield f"{name}: a buffer, which no checkpoint would hold; compute it from the micro-batch, or make it a parameter"
    for name, module in model.named_modules():
        if isinstance(module, _DropoutNd) and module.p > 0:
            yield f"{name}: {module}: its mask would be another one in a recomputation and on other ranks; take megatron.layers.dropout.Dropout"
        elif isinstance(module, nn.RNNBase | nn.MultiheadAttention) and module.dropout > 0:
            yield f"{name}: dropout {module.dropout:g} of {type(module).__name__}: its mask cannot be repeated; give it dropout=0"
