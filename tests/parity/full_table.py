"""The whole table of parity.

    python tests/parity/full_table.py [--out FILE.json] [--only PATTERN ...] [--without PATTERN ...]

--only 'zero[1-3]' are the rows with ZeRO.

Every layout with every feature in fp64, and the rows of the other precisions (layouts.py). Some
minutes on two cores. Exit code 1 when a row is off.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def main() -> int:
    import torch
    from distributed.pool import RankError, Worlds
    from parity.compare import faults_in
    from parity.layouts import full_table

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", help="write the results to this JSON file")
    some = {"nargs": "*", "default": [], "metavar": "PATTERN"}
    parser.add_argument("--only", **some, help="rows in whose names all of these are found")
    parser.add_argument("--without", **some, help="no rows in whose names one of these is found")
    arguments = parser.parse_args()
    rows = [
        row
        for row in full_table()
        if all(re.search(each, str(row)) for each in arguments.only)
        and not any(re.search(each, str(row)) for each in arguments.without)
    ]
    worlds, results, begun = Worlds(), {}, time.monotonic()
    for number, row in enumerate(rows, 1):
        started = time.monotonic()
        try:
            faults = faults_in(worlds, row)
        except RankError as error:
            faults = [str(error)]
        results[str(row)] = faults
        if faults or number % 50 == 0:
            found, seconds = "; ".join(faults[:3]) or "equal", time.monotonic() - started
            print(f"{number}/{len(rows)} {row}: {found} ({seconds:.1f} s)", flush=True)
    worlds.close()
    off = {name: faults for name, faults in results.items() if faults}
    minutes = round((time.monotonic() - begun) / 60, 1)
    print(f"{len(rows) - len(off)} of {len(rows)} rows equal in {minutes} minutes")
    if arguments.out:
        equal = sorted(results.keys() - off.keys())
        report = {"date": f"{date.today()}", "torch": torch.__version__, "minutes": minutes}
        report |= {"rows": len(rows), "off": off, "equal": equal}
        Path(arguments.out).write_text(json.dumps(report, indent=1) + "\n")
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
