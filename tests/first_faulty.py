"""`first_faulty.py INCARNATION FAULTS COMMAND...`: the command, with those faults in incarnation 1 alone."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    incarnation, faults, *command = sys.argv[1:]
    if incarnation == "1":
        os.environ |= {"STALLWATCH_TEST_FAULTS": "1", "STALLWATCH_FAULTS": faults}
    os.execvp(command[0], command)
