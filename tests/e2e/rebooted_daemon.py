"""The daemon as after a reboot: it believes the machine's boot id to be what BOOT_ID says."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import tsliced.host.journal
from tsliced.__main__ import main

boot_id = Path(os.environ["BOOT_ID"])
tsliced.host.journal._BOOT_ID = boot_id  # type: ignore[misc]  # this daemon is the test's own

if __name__ == "__main__":
    sys.exit(main())
