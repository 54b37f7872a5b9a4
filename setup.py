"""Builds the distribution megatron-gpt-pretrain; what can be declared is in pyproject.toml.

The folder kernels/ is installed as the package `megatron.kernels`: PyPI has another top-level
package `kernels`, which `transformers` imports. The modules of tools/ that pyproject.toml names as
commands are installed as `megatron.tools`, with the packages tools/_NAME/ that they are made of.
"""

import tomllib
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.editable_wheel import editable_wheel

PROJECT = tomllib.loads(Path(__file__).with_name("pyproject.toml").read_text())["project"]
TOP_LEVEL = ["mgpt_commands", "pretrain_gpt"]
COMMANDS = [target.split(":") for target in PROJECT["scripts"].values()]
TOOLS = sorted(f"megatron.tools.{name}" for module, name in COMMANDS if module == TOP_LEVEL[0])
TOOLS.append("megatron.tools._advisor")
PACKAGES = find_packages(include=["megatron", "megatron.*"])
TOOL_PACKAGES = [f"megatron.tools.{name}" for name in find_packages("tools")]


class EditableWheel(editable_wheel):
    """Installs one path entry to the checkout instead of an import hook.

    An import hook is asked last, after the namespace package `megatron` that megatron-core
    installs; a regular package on the path goes before it. `megatron/__init__.py` finds kernels/ in
    the checkout.
    """

    def finalize_options(self):
        self.distribution.packages = PACKAGES
        self.distribution.py_modules = TOP_LEVEL
        self.distribution.package_dir = {"": "."}
        super().finalize_options()


setup(
    packages=[*PACKAGES, *TOOL_PACKAGES, "megatron.kernels", "megatron.kernels.candidates"],
    package_dir={"megatron.kernels": "kernels", "megatron.tools": "tools"},
    package_data={
        "megatron.config": ["compatibility.toml"],
        "megatron.kernels": ["configurations.json", "measured.json"],
        "megatron.tools._report": ["*.css", "*.html", "*.js"],
        "megatron.tools._plan": ["devices/*.json"],
    },
    py_modules=[*TOP_LEVEL, *TOOLS],
    cmdclass={"editable_wheel": EditableWheel},
)
