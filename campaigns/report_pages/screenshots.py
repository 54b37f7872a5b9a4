"""The pictures of report pages in the documents.

    python campaigns/report_pages/screenshots.py

Trains a small model in a pipeline of two ranks, stopped and resumed once and profiled for a few
steps, makes its page and that of the study in docs/results/two_cores, and photographs their
sections in Chromium's headless shell, into docs/images/. Takes a minute on two quiet cores.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/unit/tools")]

from headless_browser import Browser, missing_browser  # noqa: E402

from tools import report  # noqa: E402

FLAGS = """--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128
--micro-batch-size 2 --global-batch-size 16 --train-iters 120 --lr 1e-2 --lr-decay-style cosine
--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --pipeline-model-parallel-size 2
--log-interval 1 --eval-interval 30 --eval-iters 2 --save-interval 40
--profile --profile-step-start 20 --profile-step-end 24 --profile-ranks 0 1""".split()
STUDY = ROOT / "docs/results/two_cores"
WIDTH, SCALE = 1040, 0.8  # of the window, in pixels; of the pictures
LARGEST = 150_000  # bytes of a picture
# of the blocks from the first of these headings up to the second, or to the notes of a study
BOX = """((first, last) => {
  const all = [...document.querySelectorAll("h1, h2")];
  const named = name => all.find(one => one.innerText === name);
  const top = one => one.getBoundingClientRect().top + scrollY;
  const end = named(last) ?? document.querySelector(".notes");
  return [top(named(first)) - 16, top(end) - 8].map(Math.round); })"""


def train(folder: Path) -> None:
    """Two starts of one run."""
    for flags in (["--exit-interval", "70"], []):
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*launch, "--nproc-per-node=2", str(ROOT / "pretrain_gpt.py"), *FLAGS, *flags]
        with open(folder.with_suffix(".log"), "ab") as log:
            both = ["--save", str(folder), "--load", str(folder)]
            subprocess.run([*command, *both], check=True, stdout=log, stderr=log)


def photograph(browser: Browser, page: Path, first: str, last: str, picture: Path) -> None:
    """The part of a page between two headings."""
    browser.open(page, WIDTH)
    top, bottom = browser.run(f"{BOX}({first!r}, {last!r})")
    browser.screenshot(picture, WIDTH, bottom - top, top, SCALE)
    size = picture.stat().st_size
    assert size < LARGEST, f"{picture}: {size} bytes"
    print(f"{picture}: {size:,} bytes")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--into", type=Path, default=ROOT / "docs/images", help="folder of pictures"
    )
    arguments = parser.parse_args()
    if reason := missing_browser():
        print(f"no browser: {reason}", file=sys.stderr)
        return 2
    arguments.into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        train(folder / "run")
        pages = {key: folder / f"{key}.html" for key in ("run", "study")}
        assert report.main([str(folder / "run"), "--output", str(pages["run"])]) == 0
        # a short path, as a reader of the checkout gives it
        study = STUDY.relative_to(ROOT)
        assert report.main([str(study), "--output", str(pages["study"])]) == 0
        browser = Browser(folder / "browser")
        try:
            into = arguments.into
            photograph(browser, pages["run"], "Goodput", "Events", into / "report_time.png")
            photograph(browser, pages["study"], "Study report", "", into / "report_study.png")
        finally:
            browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
