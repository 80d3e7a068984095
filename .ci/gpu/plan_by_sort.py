"""Candidate for `experts.plan_kernels`: ranks by a sort of a chunk in registers instead of comparing pairs. To be timed; same results."""
import torch
import triton
import triton.language as tl

from moe_lab.experts.plan_kernels import _count_kernel, _ids, _tile_rows


@triton.jit
def _place_kernel(ids_ptr, part_ptr, offsets_ptr, order_ptr, row_ptr, tiles_ptr, N, SPAN, NC, M, E: tl.constexpr, EP: tl.constexpr,
                  CHUNK: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, TB: tl.constexpr):
    "order, row, offsets and the tile table. NC: spans, read ROWS at a time; TB: rows of the tile table a program writes."
    c = tl.program_id(0)
    e = tl.arange(0, EP)
    total = tl.zeros((EP,), tl.int32)
    before = tl.zeros((EP,), tl.int32)
    for b in range(0, NC, ROWS):
        r = b + tl.arange(0, ROWS)
        h = tl.load(part_ptr + r[:, None] * EP + e[None, :], mask=(r < NC)[:, None], other=0)
        total += tl.sum(h, 0)
        before += tl.sum(tl.where((r < c)[:, None], h, 0), 0)
    start = tl.cumsum(total, 0) - total
    rows = tl.sum(total, 0)
    if c == 0: tl.store(offsets_ptr + e, start, mask=e < E)
    if c == 0: tl.store(offsets_ptr + E, rows)
    if c * TB < M: _tile_rows(tiles_ptr, total, start, c * TB + tl.arange(0, TB), M, E, TILE)
    first = tl.minimum(c * SPAN, N)
    end = tl.minimum(first + SPAN, N)
    base = start + before
    behind = rows + first - tl.sum(before, 0)             # assignments without an expert stand behind all rows, in order
    at = tl.arange(0, CHUNK)
    for i0 in range(first, end, CHUNK):
        v, ok = _ids(ids_ptr, i0 + at, end, E)
        hist = tl.histogram(v, EP, mask=ok)
        found = tl.sum(hist, 0)
        place = tl.sort(tl.where(ok, v, tl.where(i0 + at < end, EP, EP + 1)) * CHUNK + at)      # no expert, then no id: last
        e_at, i = place // CHUNK, i0 + place % CHUNK
        here = e_at < EP
        shift = base - (tl.cumsum(hist, 0) - hist)        # from the place in the sorted chunk to the row
        row = tl.where(here, tl.gather(shift, tl.minimum(e_at, EP - 1), 0), behind - found) + at
        tl.store(row_ptr + i, tl.where(here, row, -1), mask=e_at <= EP)
        tl.store(order_ptr + row, i, mask=e_at <= EP)
        base += hist
        behind += tl.minimum(end - i0, CHUNK) - found


CONFIG = dict(CHUNK=512, PROGRAMS=256, num_warps=4)        # ids of a round, programs at most (fewer beyond 256 experts)
_TB = 64                                                   # rows of the tile table a program writes

def plan_triton(expert, num_experts, tile, config=CONFIG):
    "The Triton body of `expert_plan`: offsets, order, row, tiles."
    (T, k), E, c = expert.shape, num_experts, {**CONFIG, **config}
    N, EP, warps = T * k, max(2, triton.next_power_of_2(E)), dict(num_warps=c["num_warps"])
    new = lambda *shape: torch.empty(shape, dtype=torch.int32, device=expert.device)
    M, programs = N // tile + E, c["PROGRAMS"] if EP <= 256 else c["PROGRAMS"] // 2
    span = c["CHUNK"] * triton.cdiv(N, c["CHUNK"] * programs)
    NC = triton.cdiv(N, span) if N else 0
    offsets, order, row, tiles, part = new(E + 1), new(N), new(T, k), new(M, 4), new(max(NC, 1), EP)
    if NC: _count_kernel[(NC,)](expert, part, N, span, E=E, EP=EP, B=1024, **warps)
    _place_kernel[(max(NC, triton.cdiv(M, _TB)),)](expert, part, offsets, order, row, tiles, N, span, NC, M, E=E, EP=EP, CHUNK=c["CHUNK"],
                                                 ROWS=max(4, min(32, 4096 // EP)), TILE=tile, TB=_TB, **warps)
    return offsets, order, row, tiles
