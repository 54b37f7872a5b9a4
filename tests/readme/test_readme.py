"""The README and the pages it leads to are true: their commands run, their paths exist."""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
import yaml
from programs import output_of

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from document_results import documents  # noqa: E402

README = (ROOT / "README.md").read_text()
# in the order in which a newcomer reads them: the second continues from the first
TUTORIALS = [ROOT / f"docs/tutorials/{name}.md" for name in ("first_run", "your_data")]
INSTALL = (ROOT / "docs/howto/install.md").read_text()
MAP = (ROOT / "docs/code.md").read_text()
PAGES = sorted({*documents(), *ROOT.glob("*.md"), *ROOT.glob("examples/*/README.md")})
TEST_COMMAND = "bash scripts/test.sh"
STEPS = 40  # of the quickstart in the default command


def commands(text: str) -> list[str]:
    """The commands of all ```bash blocks, in order, continued lines joined, comments dropped."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.S | re.M)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [
        line.split("  #")[0].strip() for line in lines if line.strip() and not line.startswith("#")
    ]


def test_the_test_command_is_what_ci_runs():
    assert TEST_COMMAND in commands(README)
    assert (ROOT / ".ci/run").read_text().splitlines()[1:] == [TEST_COMMAND]
    workflow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())
    steps = [step["run"] for step in workflow["jobs"]["test"]["steps"] if "run" in step]
    assert steps == [command for command in commands(README) if command.startswith("bash ")]


@pytest.fixture(scope="session")
def quickstart(clone: Path, environment: dict[str, str]) -> str:
    """What the README's first command prints in a fresh checkout, with STEPS steps."""
    return output_of(commands(README)[0], clone, {**environment, "QUICKSTART_STEPS": str(STEPS)})


@pytest.mark.slow
def test_the_readmes_commands_run(quickstart: str, clone: Path, environment: dict[str, str]):
    """They are the quickstart and the test command, which is this run."""
    assert commands(README) == ["bash scripts/quickstart.sh", TEST_COMMAND]
    quickstart_did_its_work(quickstart, clone, STEPS)


@pytest.mark.full
@pytest.mark.slow
def test_the_quickstart_reaches_the_expected_loss(
    quickstart: str, clone: Path, environment: dict[str, str]
):
    """As it is, with the tokenizer of the shorter one; started again, it only reports."""
    shutil.rmtree(clone / "quickstart/run")
    quickstart_did_its_work(output_of(commands(README)[0], clone, environment), clone, 200)
    again = output_of(commands(README)[0], clone, environment)
    assert re.search(r"validation loss.*expected.*got", again)
    assert "consumed samples" not in again, "a second run must not train again"


@pytest.mark.full
@pytest.mark.slow
def test_the_tutorials_commands_run(quickstart: str, clone: Path, environment: dict[str, str]):
    """In their order, after the quickstart."""
    listed = [command for page in TUTORIALS for command in commands(page.read_text())]
    assert len(listed) > 10
    for command in listed:
        output_of(command, clone, environment)


def quickstart_did_its_work(shown: str, clone: Path, steps: int) -> None:
    """Two processes trained, the second from the first one's checkpoint; text, page and verdict
    came out.
    """
    half = steps // 2
    loaded = rf"loaded checkpoint \S+iter_{half:07} at iteration {half}"
    assert len(re.findall(loaded, shown)) == 1, shown[-4000:]
    for done in (half, steps):
        assert re.search(rf"iteration +{done}/ +{steps} ", shown)
    assert re.search(r"validation loss.*expected.*got", shown), shown[-2000:]
    assert re.search(r"ROMEO\.\n\s*\S.*\w{3}", shown)
    page = (clone / "quickstart/report.html").read_text()
    assert page.count("<svg") >= 4
    assert (clone / "quickstart/run/metrics.jsonl").exists() and (
        clone / f"quickstart/run/iter_{steps:07}"
    ).is_dir()


def test_the_readme_is_short():
    lines = README.splitlines()
    assert len(lines) <= 120
    marks = re.compile(r"<!-- .*?-->")
    assert not [line for line in lines if len(marks.sub("", line)) > 100]


PATHS = r"`([\w.\-/]+(?:/|\.(?:py|sh|sbatch|md|toml|txt|json)))`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_paths_that_a_page_names_exist(page: Path):
    """Those in the checkout; other programs' files are named with their folder."""
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"quickstart", ".venv"}
    if page.parent.name == "migration":
        folders.remove("examples")  # of the other program
    named = set(re.findall(PATHS, page.read_text()))
    ours = {name for name in named if name.split("/")[0] in folders}
    missing = sorted(name for name in ours if not (ROOT / name).exists())
    assert not missing, f"{page.name} names what is not there: {missing}"


FLAGS = r"(?<![\w-])--[a-z0-9][\w-]*"
# of pip, ruff, Slurm, py-spy, lm-eval and mkdocs
OTHERS_FLAGS = {
    *("--fix", "--index-url", "--python-version", "--platform", "--target"),
    *("--account", "--qos", "--batch", "--pid"),
    *("--model", "--model_args", "--tasks", "--batch_size", "--strict"),
}


@cache
def known_flags() -> set[str]:
    """The program's, which docs/flags.md lists, and those of our programs and scripts."""
    patterns = ("tools/*.py", "tools/_*/*.py", "benchmarks/*.py", "kernels/tools/*.py")
    patterns += ("campaigns/*/*.py", "tests/**/*.py", "scripts/**/*.py", "scripts/*.s*")
    sources = [file for each in patterns for file in ROOT.glob(each) if file != Path(__file__)]
    found = [file.read_text() for file in (ROOT / "docs/flags.md", *sources)]
    return {flag for text in found for flag in re.findall(FLAGS, text)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_flags_that_a_page_names_exist(page: Path):
    text = re.sub(r"\n### Removed\n.*?\n### ", "", page.read_text(), flags=re.DOTALL)
    unknown = set(re.findall(FLAGS, text)) - known_flags() - OTHERS_FLAGS
    assert not unknown, f"{page.name} names flags that do not exist: {sorted(unknown)}"


def test_files_that_a_picture_names_exist():
    drawn = "".join(picture.read_text() for picture in (ROOT / "docs/images").glob("*.svg"))
    named = set(re.findall(r">((?:\w+/)+\w+\.py)", drawn))
    missing = sorted(name for name in named if not (ROOT / "megatron" / name).exists())
    assert len(named) > 5 and not missing


def test_every_package_is_on_the_map():
    named = set(re.findall(PATHS, MAP))
    packages = {
        f"megatron/{path.parent.name}/" for path in (ROOT / "megatron").glob("*/__init__.py")
    }
    tools = {
        path.relative_to(ROOT).as_posix()
        for folder in ("tools", "benchmarks", "kernels/tools")
        for path in (ROOT / folder).glob("*.py")
        if not path.name.startswith("_")
    }
    tests = {
        f"tests/{path.name}/" for path in (ROOT / "tests").iterdir() if any(path.glob("test_*.py"))
    }
    assert not (packages | tools | tests | {"kernels/"}) - named, (
        "docs/code.md leaves something out"
    )


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ +(.+?) *$", page.read_text(), re.M)
    plain = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title).lower() for title in titles]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page: Path):
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.S | re.M)
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if not link.startswith(("https://", "http://")):
            file, _, anchor = link.partition("#")
            target = page.parent / file if file else page
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_every_page_is_in_the_navigation_of_the_site():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    pages = {
        page.relative_to(ROOT / "docs").as_posix() for page in documents() if page.parent != ROOT
    }
    assert pages | {"results/attention_kernels.md"} == set(
        re.findall(r": (\S+\.md)$", navigation, re.M)
    )


def test_every_page_is_in_the_index():
    index = ROOT / "docs/README.md"
    linked = {
        (index.parent / link.split("#")[0]).resolve()
        for link in re.findall(r"\]\(([^)]+)\)", index.read_text())
    }
    missing = {*documents()} - linked - {index, ROOT / "README.md"}
    assert not missing, f"docs/README.md does not lead to {missing}"


def test_the_page_on_installing_lists_every_command():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts.keys() == set(re.findall(r"`(mgpt-[\w-]+)`", INSTALL))


def test_the_expected_loss_is_the_scripts():
    loss, tolerance = re.search(
        r"expected_loss=(\S+) tolerance=(\S+)", (ROOT / "scripts/quickstart.sh").read_text()
    ).groups()
    assert (
        f"**{loss} ± {tolerance}**" in README
        and f"{loss} ± {tolerance}" in TUTORIALS[0].read_text()
    )
