"""Heartbeat ABI 1 in numbers: the board file, byte by byte. Explained in docs/heartbeat-abi.md.

Everything is little-endian and 8-byte aligned, so that each value is one store and one load.
"""

from __future__ import annotations

ENV = "STALLWATCH_BOARD"  # path of the board folder
BOARD_FILE = "board"
CLAIMS = "claims"  # claims/p<n> and claims/l<n>: who owns a process slot, a lane slot
DUMPS = "dumps"  # where faulthandler files lie

MAGIC = b"STLWBRD\x01"
ABI = 1

# Header, one page.
HEADER_SIZE = 4096
HEADER_STRUCT = "<8sIIIIIIIIQQIIQQ64s"  # see HEADER_FIELDS
HEADER_FIELDS = (
    "magic",
    "abi",
    "header_size",
    "process_slots",
    "process_size",
    "lane_slots",
    "lane_size",
    "names",
    "name_size",
    "total_size",
    "incarnation",
    "supervisor_pid",
    "reserved",
    "supervisor_ticks",
    "created_ns",
    "engine",
)
CONTROL = 256  # u64: control word, bits below
FAILURE_SEQ = 264  # u64: odd while the record is being replaced
FAILURE_LENGTH = 272  # u64: bytes of JSON that follow at FAILURE_RECORD, 0: none
FAILURE_RECORD = 512
FAILURE_MAX = 1024
CONTROL_FAILED = 1
CONTROL_STOP = 2

# Process slot: offsets in bytes.
PROCESS_SIZE = 256
P_STAMP = 0  # u64 ns of the newest update, 0 while it is being written
P_GENERATION = 8  # u64, differs for every claim of the slot
P_PID = 16  # u32
P_RANK = 20  # i32
P_TICKS = 24  # u64
P_ATTACHED = 32  # u64 ns
P_FLAGS = 40  # u32
P_SIGNAL = 44  # u32
P_PAUSE_ENTERED = 48  # u64 ns
P_PAUSE_UNTIL = 56  # u64 ns, 0: no lease; bytes 64 to 79 are reserved
P_ROLE = 80
P_ROLE_SIZE = 32
P_PAUSE_NAME = 112
P_PAUSE_OWNER = 144
P_PAUSE_SIZE = 32
P_DUMP = 176  # file name inside dumps/
P_DUMP_SIZE = 48
P_PENDING = 240  # i64, outside the stamp: one word, always whole
FLAG_READY = 1
FLAG_DETACHED = 2

# Lane slot: indexes of 8-byte words; L_NAME and L_TEXT are byte offsets.
LANE_SIZE = 640
L_GENERATION = 0  # 0: unused or being claimed; else differs for every claim of the slot
L_IDS = 1  # pid in the low, tid in the high 32 bits
L_TICKS = 2
L_OWNER = 3  # process slot in the low 32 bits, flags in the high 32 bits
L_DEPTH = 4  # 1..4: how many frames count; one store enters or leaves a phase
L_WORK = 5
L_TOO_DEEP = 6
L_NAME = 64
L_NAME_SIZE = 32
L_FRAMES = 16  # word index of frame 0
FRAME_WORDS = 8  # one cache line each
L_TEXT = 384
TEXT_SIZE = 256
MAX_DEPTH = 4
LANE_CHANNEL = 1
LANE_CLOSED = 2

# Frame: indexes of 8-byte words.
F_ENTERED = 0  # 0 while the frame is being written: it is the frame's sequence, too
F_WORD = 1
F_PROGRESS = 2  # counts only when later than F_ENTERED
F_LIMIT = 3  # counts only when HAS_LIMIT is set
F_DETAIL0 = 4
F_DETAIL1 = 5

# The frame word: every constant of a phase in one store.
CLASS_MASK = 0x7
HAS_LIMIT = 1 << 3
DETAILS_SHIFT, DETAILS_MASK = 4, 0x3
TEXT_SHIFT, TEXT_MASK = 6, 0x1FF
PHASE_SHIFT, WAIT_SHIFT, NAME0_SHIFT, NAME1_SHIFT = 16, 28, 40, 52
ID_MASK = 0xFFF

# Name table: one per process slot. Entry 0 is never used (id 0 means no name).
NAME_SIZE = 64
NAMES = 256
N_LIMIT = 0  # u64 ns: limit bound to the phase of this entry, 0: none
N_LENGTH = 8  # u8
N_TEXT = 9
N_TEXT_SIZE = 55

# Classes, as in board.image.LaneClass.
CLASSES = {"idle": 0, "work": 1, "wait": 2, "start": 3, "pause": 4, "stop": 5}

INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1


def process_offset(slot: int) -> int:
    """Byte offset of a process slot."""
    return HEADER_SIZE + slot * PROCESS_SIZE


def lane_offset(processes: int, slot: int) -> int:
    """Byte offset of a lane slot on a board with that many process slots."""
    return HEADER_SIZE + processes * PROCESS_SIZE + slot * LANE_SIZE


def names_offset(processes: int, lanes: int, slot: int) -> int:
    """Byte offset of a process slot's name table."""
    return lane_offset(processes, lanes) + slot * NAMES * NAME_SIZE


def total_size(processes: int, lanes: int) -> int:
    """Size of the whole file in bytes."""
    return names_offset(processes, lanes, processes)
