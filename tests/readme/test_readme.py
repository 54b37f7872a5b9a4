"""The README tells the truth: its commands run, its paths exist, its figures are those of the scripts."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
TEST_COMMAND = "bash scripts/test.sh"


def commands(text: str) -> list[str]:
    """The commands of all ```bash blocks, in order, continued lines joined, comments dropped."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.S | re.M)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.strip() and not line.startswith("#")]


def run(command: str, folder: Path, environment: dict[str, str]) -> str:
    """Standard output of a shell command that must succeed."""
    done = subprocess.run(["bash", "-c", command], cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\nexit code {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def test_the_test_command_is_what_ci_runs():
    assert TEST_COMMAND in commands(README)
    assert (ROOT / ".ci/run").read_text().splitlines()[1:] == [TEST_COMMAND]


@pytest.mark.slow
def test_every_command_runs(clone: Path, environment: dict[str, str]):
    """In the README's order, the quickstart first; installing is test_install.py's, the test command is this run."""
    listed = commands(README)
    assert listed[0] == "bash scripts/quickstart.sh" and len(listed) > 5
    for command in listed:
        if command == TEST_COMMAND or command.startswith("pip install"):
            continue
        shown = run(command, clone, environment)
        if command == "bash scripts/quickstart.sh":
            quickstart_did_its_work(shown, clone)
            again = run(command, clone, environment)
            assert re.search(r"validation loss.*expected.*got", again)
            assert "consumed samples" not in again, "a second run must not train again"


def quickstart_did_its_work(shown: str, clone: Path) -> None:
    """Two processes trained, the second from the first one's checkpoint; text, page and verdict came out."""
    assert len(re.findall(r"loaded checkpoint \S+iter_0000300 at iteration 300", shown)) == 1, shown[-4000:]
    assert re.search(r"iteration +300/ +600 ", shown) and re.search(r"iteration +600/ +600 ", shown)
    assert re.search(r"validation loss.*expected.*got", shown), shown[-2000:]
    assert re.search(r"ROMEO\.\n.*\w{3}", shown)
    page = (clone / "quickstart/report.html").read_text()
    assert page.count("<svg") >= 4
    assert (clone / "quickstart/run/metrics.jsonl").exists() and (clone / "quickstart/run/iter_0000600").is_dir()


def test_paths_exist_and_every_room_is_on_the_map():
    named = set(re.findall(r"`([\w.\-/]+(?:/|\.(?:py|sh|md|toml|txt|json)))`", README))
    links = set(re.findall(r"\]\(([^)#:]+)\)", README))
    assert len(named) > 20 and links
    created = {name for name in named if name.startswith(("quickstart/", ".venv/"))}
    missing = sorted(name for name in (named | links) - created if not (ROOT / name).exists())
    assert not missing, f"README.md names what is not there: {missing}"
    rooms = {f"megatron/{path.parent.name}/" for path in (ROOT / "megatron").glob("*/__init__.py")}
    tools = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tools").glob("*.py")}
    assert not (rooms | tools | {"kernels/"}) - named, "README.md's map leaves out a room or a tool"


def test_the_expected_loss_is_the_scripts():
    loss, tolerance = re.search(r"expected_loss=(\S+) tolerance=(\S+)", (ROOT / "scripts/quickstart.sh").read_text()).groups()
    assert f"**{loss} ± {tolerance}**" in README
