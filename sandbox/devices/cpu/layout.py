"""Byte offsets of the native structures, shared by generated code, the native runtime and Python.

Every field is eight bytes. CTX: one launch. BLOCK: one resident block. THREAD: one thread of it, with exchange slots
for warp-wide instructions, the frame of its saved registers, its local memory and its queue of cp.async copies.
"""

from __future__ import annotations

# --- CTX
C_STATUS = 0  # 0 runs or done, else a FAULT_* or HANG_* code
C_SITE = 8
C_ADDR = 16
C_SIZE = 24
C_BLOCK = 32
C_THREAD = 40
C_PARAMS = 64
C_SITES = 80  # {lo, count} per memory site: last buffer hit
C_COUNTERS = 88  # executions per basic block
C_TABLE = 96  # buffers sorted by address: {lo, hi, shadow, index}
C_NBUF = 104
C_GRID = 112  # x, y, z
C_NTID = 136  # x, y, z
C_CLUSTER = 160  # x, y, z
C_THREADS = 184  # per block
C_SMEM = 192
C_TSTRIDE = 200
C_BSTRIDE = 208
C_SLOTS = 216
C_NSLOTS = 224
C_ORDER = 232  # permutation of cluster numbers, 4 bytes each
C_NCLUSTERS = 240
C_NEXT = 248
C_KERNEL = 264
C_CLOCK = 272
C_BUDGET = 280
C_SEED = 288
C_FOUND = 296  # findings: {kind, site, addr, size, block, thread, extra, 0}
C_NFOUND = 304
C_MAXFOUND = 312
C_NBB = 320
C_EFFECTS = 328  # a byte per basic block: 1 when it changes memory
C_EFFSUM = 336  # effects of threads that count for themselves, in forced rounds
C_FORCED = 344
C_MAXFORCED = 352
C_EXACT = 360
C_FORCE = 368
C_HASH = 376
C_FRAMEBYTES = 392  # of the part of THREAD that decides what it does next
C_LOCAL = 400  # bytes of local memory
C_LAZY = 408  # copies complete as late as allowed
C_SCRATCH = 416
C_BULKBYTES = 424  # bulk bytes global->shared, shared->global
C_BARRIERS = 440  # barrier phases completed
C_ENTERS = 448
C_CLUSTERSIZE = 472
C_STATIC = 480
C_BULKWRITTEN = 496
C_ACTIVE = 512
C_CLUSTERPHASES = 504
C_AGENTS = 520  # race check: warps in all, and tables of clocks
C_WARPS = 528
C_VC = 536
C_OBJECTS = 544
C_OBJECTVC = 552
C_FENCEVC = 560
C_READVC = 568
C_LANESYNC = 576
C_PROFILE = 584  # per block of the grid: counters of its threads, or 0; 0 when no block is sampled
C_SAVEDEFF = 592  # forced rounds: effects when the hash was kept, rounds since, and after how many it is kept anew
C_SINCE = 600
C_SPAN = 608
C_UNSET = 616  # secret of what memory and registers hold before they are written
C_ROOM = 624  # race check: places for synchronisation objects, a power of two; how many were wanted
C_USED = 632
C_BYTES = 640

# --- BLOCK
B_STATE = 0  # 0 free, 1 running
B_CTAID = 8  # x, y, z
B_LINEAR = 32
B_RANK = 40
B_BASE = 48  # slot of rank 0
B_CLUSTER = 56
B_SMEM = 64
B_SHADOW = 72
B_LO = 80  # shared address of the first byte
B_THREADS = 96
B_LIVE = 104
B_CARRIVED = 120  # cluster barrier, in rank 0: arrivals, phase, live threads
B_CPHASE = 128
B_CLIVE = 136
B_BARS = 144  # 16 x {arrived, expected, phase, red}
B_BULK = 656  # queue of bulk copies
B_NBULK = 664
B_SMID = 680
B_ORDER = 688
B_SEQ = 696  # how many blocks started before
B_CELLS = 704  # race cells of shared memory
B_BYTES = 768
BAR_BYTES = 32
BULK_BYTES = 80
BULK_CAPACITY = 1024

# --- THREAD
T_PC = 0
T_STATE = 8
T_A = 16
T_B = 24
T_MASK = 32
T_SITE = 40
T_TID = 48  # x, y, z
T_LINEAR = 72
T_LANE = 80
T_CPHASE = 88
T_NCOPY = 104
T_COMMITTED = 112  # cp.async groups
T_BCOMMITTED = 120  # bulk groups
T_BACKOFF = 128
T_SKIP = 136
T_OP = 152
T_X = 192  # exchange slots
T_XSLOTS = 40
T_FRAME = T_X + 8 * T_XSLOTS
COPY_BYTES = 32
COPY_CAPACITY = 128

# thread states
READY, DONE, MEET, BAR, CLUSTER, WATCH, MBAR, YIELD = range(8)

# addresses
SMEM_START = 1024
RANK_SHIFT = 24
SHARED_TAG = 0x40000000  # upper half of a generic address of shared memory
LOCAL_TAG = 0x50000000
PARAM_TAG = 0x60000000

# access flags
LOAD, STORE, ATOMIC, ASYNC, STRONG = 1, 2, 4, 8, 128
CELL = 48  # bytes of race information per byte of memory
OBJECTS = 8192  # places at least
GLOBAL, GENERIC, SHARED, LOCAL, PARAM = 0, 16, 32, 48, 64
SPACE_MASK = 112

# shadow bytes
UNWRITTEN, MBARRIER, WRITTEN = 0, 0xFE, 0xFF

# faults
F_BOUNDS, F_ALIGN, F_MBAR, F_MBAR_COUNT, F_BARRIER, F_TRAP, F_WARP, F_BULK, F_QUEUE, F_DIVIDE = (
    range(1, 11)
)
H_DEADLOCK, H_LIVELOCK, H_BUDGET = 32, 33, 34

# findings
N_UNWRITTEN, N_RACE, N_SHFL, N_TRAILING = 1, 2, 3, 4

SLICE = 1 << 20
SPARE = 30720  # bytes of the scratch area that accesses after a fault may use

# warp-wide operations
(O_SYNC, O_SHFL_IDX, O_SHFL_UP, O_SHFL_DOWN, O_SHFL_BFLY, O_VOTE_ALL, O_VOTE_ANY, O_VOTE_UNI, O_BALLOT,
 O_REDUX_ADD, O_REDUX_MIN, O_REDUX_MAX, O_REDUX_UMIN, O_REDUX_UMAX, O_REDUX_AND, O_REDUX_OR, O_REDUX_XOR,
 O_MATCH_ANY, O_MATCH_ALL, O_ELECT, O_ACTIVE, O_LDMATRIX, O_STMATRIX, O_MMA, O_MOVMATRIX) = range(25)  # fmt: skip
