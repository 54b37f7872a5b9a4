"""Pretraining of GPT models under tensor, sequence, pipeline, context and data parallelism."""

import os
import sys

__version__ = "0.1.0"

# `kernels/` stays a top-level folder but is imported as `megatron.kernels`, because PyPI has
# another package `kernels`. Programs of tools/ and benchmarks/ are imported in this way as well:
# other projects install packages of these names.
_checkout = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if os.path.exists(os.path.join(_checkout, "kernels", "philox.py")):
    __path__.append(_checkout)


class OtherMegatron:
    """The last finder of modules: explains why a module of another package `megatron` (Megatron-LM,
    megatron-core) is not found next to this one.
    """

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Raises ModuleNotFoundError for a module that another folder on the path holds."""
        package, _, rest = name.partition(".")
        if package != __name__ or not rest:
            return
        part = rest.partition(".")[0]
        for folder in sys.path:
            other = os.path.abspath(os.path.join(folder, "megatron"))
            held = (os.path.join(other, part), os.path.join(other, f"{part}.py"))
            if other not in map(os.path.abspath, __path__) and any(map(os.path.exists, held)):
                raise ModuleNotFoundError(
                    f"{name}: `import megatron` finds {__path__[0]} (megatron-gpt-pretrain), and "
                    f"{part} is in {other}: two packages named megatron cannot share an "
                    "environment; use one environment for each",
                    name=name,
                )


sys.meta_path.append(OtherMegatron)  # type: ignore[arg-type]
