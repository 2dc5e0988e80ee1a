// Products of a matrix with many rows of x, by tiles of AMX or by vectors, summed in float32.
//
// Weights stay as they are for decoding. Some of their rows at a time are laid across into a panel near the core, which all rows of x then
// meet: int8 and int4 by tiles as bfloat16, which they become on the way, and by vectors as bytes (bytes.h). Letters: m rows of x, n rows of a matrix, k columns.

#pragma once

#include <omp.h>

#include <algorithm>
#include <vector>

#include "bytes.h"

namespace {

// Rows of x at a time, for who keeps what lies between two products, and bytes of a panel.
constexpr long MOST = 512, PANEL = 256 << 10;

void int8_across(const int8_t *w, long rows, long k, bf16 *to) {
    for (long c = 0; c < k; c += 32, to += SIZE) {
        __m512i r[16];
        for (long i = 0; i < 16; i++) {
            if (i >= rows) {
                r[i] = _mm512_setzero_si512();
                continue;
            }
            const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(w + i * k + c))));
            const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(w + i * k + c + 16))));
            r[i] = (__m512i)_mm512_cvtne2ps_pbh(high, low);
        }
        transpose(r);
        for (int i = 0; i < 16; i++) _mm512_store_si512(to + 32 * i, r[i]);
    }
}

// Codes lie across as they are stored.
void int4_across(const Matrix &a, long tile, bf16 *to) {
    const long groups = (a.columns + a.group - 1) / a.group, blocks = groups * a.group / BLOCK;
    const __m512i table = centred(), upper = _mm512_set1_epi32(0xffff0000);
    const uint8_t *codes = (const uint8_t *)a.weights + tile * blocks * 64;
    for (long b = 0; b < a.columns / BLOCK; b++, codes += 64) {
        const __m512i told = _mm512_loadu_si512(a.scales + (tile * groups + b * BLOCK / a.group) * 2 * TILE);
        const __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(told, 16)), zero = _mm512_castsi512_ps(_mm512_and_si512(told, upper));
        const __m512i four = _mm512_loadu_si512(codes);
        for (int j = 0; j < 4; j++, to += 32) {
            const __m512i two = _mm512_permutexvar_epi16(_mm512_srli_epi16(four, 4 * j), table);
            const __m512 even = _mm512_fmadd_ps(scale, _mm512_castsi512_ps(_mm512_slli_epi32(two, 16)), zero);
            const __m512 odd = _mm512_fmadd_ps(scale, _mm512_castsi512_ps(_mm512_and_si512(two, upper)), zero);
            _mm512_store_si512(to, in_turn(even, odd));
        }
    }
}

// Sixteen rows of a matrix from this one on, a multiple of sixteen where they are in int4. The scales of int8 come later.
void lay_across(const Matrix &a, long row, bf16 *to) {
    const long k = a.columns, rows = std::min(TILE, a.rows - row);
    if (a.kind == WIDE) across((const bf16 *)a.weights + row * k, k, rows, k, to, TILE * k);
    if (a.kind == INT8) int8_across((const int8_t *)a.weights + row * k, rows, k, to);
    if (a.kind == INT4) int4_across(a, row / TILE, to);
}

// Rows of a matrix as they are stored, brought near: so many cache lines of tiles from `first` on, a share of them at each of so many calls.
struct Coming {
    const Matrix &a;
    long first, lines, calls, row, call = 0;
    Coming(const Matrix &a, long first, long tiles, long calls) : a(a), first(first), calls(calls) {
        row = a.kind == INT4 ? up(a.columns, a.group) / 2 : a.kind == INT8 ? a.columns : 2 * a.columns;
        lines = tiles * row * TILE / 64;
    }
    template <class RowOf>
    void bring(RowOf row_of) {
        const long each = row * TILE / 64, end = lines * (call + 1) / calls;
        for (long line = lines * call++ / calls; line < end; line++)
            _mm_prefetch((const char *)a.weights + row_of(first + line / each) * row + line % each * 64, _MM_HINT_T1);
    }
};

// What is read and written as products are taken: rows of so many numbers, of which a pair of tiles touches 32.
struct Touched {
    const bf16 *read, *written;
    long row;
    void bring(long begin, long rows, long column) const {
        for (long i = begin; i < begin + rows; i++) {
            if (read) _mm_prefetch((const char *)(read + i * row + column), _MM_HINT_T0);
            __builtin_prefetch(written + i * row + column, 1);
        }
    }
};

// What belongs to sixteen columns of a product.
struct Columns {
    long at;
    __mmask16 lanes;
    __m512 scale, bias;
    bool scaled;
    Columns(const Matrix &a, long at, bool scaled) : at(at), lanes(live(std::max(0l, a.rows - at))), scaled(scaled) {
        scale = scaled ? wide(lanes, a.scales + at) : _mm512_set1_ps(1);
        bias = a.bias ? wide(lanes, a.bias + at) : _mm512_setzero_ps();
    }
    __m512 operator()(const float *c) const { return _mm512_fmadd_ps(_mm512_load_ps(c), scale, bias); }
};

// Tiles of a matrix, and the first row of each, where they go in order.
long in_order(long tile) { return tile * TILE; }
long tiles_of(long rows) { return up(rows, TILE) / TILE; }

// What `multiply` takes: products rounded to out[m, n].
auto rounded(bf16 *out, long n) {
    return [=](long i, const Columns &left, const Columns &right, __m512 one, __m512 two) {
        narrow(left.lanes, one, out + i * n + left.at);
        narrow(right.lanes, two, out + i * n + right.at);
    };
}

// The first tile of each panel, and the end of the last one. Panels are even, and such that the threads end together: by tiles all of one
// size, by vectors ever smaller ones towards the end, as these take longer, and not every core is as fast as the next at every moment.
void cut_panels(long tiles, long bytes, long threads, bool by_tiles, std::vector<long> &bounds) {
    const long most = std::max(2l, PANEL / bytes / 2 * 2);
    long best = 2, cost = tiles * threads * 2;
    for (long size = 2; size <= most; size += 2) {
        const long each = (up(tiles, size) / size + threads - 1) / threads * size;
        if (each <= cost) best = size, cost = each;
    }
    bounds.clear();
    for (long at = 0; at < tiles; at += by_tiles ? best : std::clamp((tiles - at) / (4 * threads) * 2, 2l, most)) bounds.push_back(at);
    bounds.push_back(tiles);
}

// A product of 32 rows and 32 columns that is yet to be taken.
struct Taken {
    alignas(64) float c[PAIR * PAIR];
    long begin, rows, left, right;
};

// All rows of x in bytes, filled up to whole pairs of tiles, of which what is not in x is anything.
Bytes in_bytes(const bf16 *x, long m, long k) {
    static thread_local Kept<uint8_t> all_codes;
    static thread_local Kept<float> all_scales;
    const long rows = up(m, PAIR), groups = groups_of(k);
    uint8_t *codes;
    float *scales;
#pragma omp single copyprivate(codes, scales)
    codes = all_codes.of(rows * k), scales = all_scales.of(rows * groups);
#pragma omp for schedule(static)
    for (long i = 0; i < m; i++) to_bytes(x + i * k, k, codes + i * k, scales + i * groups);
    return {codes, scales};
}

// x[m, k] times a matrix, its tiles in the order of `row_of`: take(row of x, first column and what belongs to sixteen, twice, and values),
// which touches what it is told to. To be called by all threads of a region, which wait for each other at the end.
template <class RowOf, class Take>
void multiply(const Matrix &a, const bf16 *x, long m, long tiles, RowOf row_of, Touched touched, Take take) {
    static thread_local Kept<bf16> panels, tails;
    static thread_local std::vector<long> bounds;
    const bool by_tiles = a.tiles && tiles_allowed(), by_bytes = a.bytes && !by_tiles;
    const long k = a.columns, steps = k / 32, threads = omp_get_num_threads(), laid = by_bytes ? laid_bytes(k) / 2 : k * TILE;
    const Bytes bytes = by_bytes ? in_bytes(x, m, k) : Bytes{nullptr, nullptr};
    cut_panels(tiles, 2 * laid, threads, by_tiles, bounds);
    const long panels_all = bounds.size() - 1, blocks = up(m, PAIR) / PAIR;
    const long parts = std::min(blocks, (threads + panels_all - 1) / panels_all);
    bf16 *panel = panels.of(up(bounds[1], 2) * laid), *tail = tails.of(PAIR * k);
    if (m % PAIR && !by_bytes) {
        const long rest = m % PAIR * k;
        std::copy_n(x + m / PAIR * PAIR * k, rest, tail);
        std::fill_n(tail + rest, PAIR * k - rest, (bf16)0);
    }
    const auto row = [=](long t) { return t < tiles ? row_of(t) : a.rows; };
    // Bytes come scaled.
    const auto columns = [=](long at) { return Columns(a, at, a.kind == INT8 && !by_bytes); };
    Taken both[2];
    for (Taken &one : both) one.rows = one.left = one.right = 0;
    long turn = 0;
    const long each = (PAIR + steps - 1) / steps;
    const auto take_rows = [&](const Taken &done, const Columns &left, const Columns &right, long from, long to) {
        for (long i = from; i < std::min(to, done.rows); i++)
            take(done.begin + i, left, right, left(done.c + i * PAIR), right(done.c + i * PAIR + 16));
    };
#pragma omp for schedule(dynamic, 1)
    for (long task = 0; task < panels_all * parts; task++) {
        const long first = bounds[task / parts], last = bounds[task / parts + 1], count = up(last - first, 2), part = task % parts;
        const long begin = blocks * part / parts, end = blocks * (part + 1) / parts;
        for (long t = first; t < last; t++) {
            bf16 *to = panel + (t - first) * laid;
            by_bytes ? lay_bytes(a, row_of(t), (uint8_t *)to) : lay_across(a, row_of(t), to);
        }
        // Likely the thread's next panel.
        const long next = std::min((task + threads) / parts, panels_all);
        const bool other = !by_tiles && next < panels_all && bounds[next] != first;
        Coming coming(a, bounds[next], other ? bounds[next + 1] - bounds[next] : 0, (end - begin) * count / 2);
        for (long block = begin; block < end; block++) {
            const long rows = std::min(PAIR, m - block * PAIR);
            const bf16 *from = rows < PAIR ? tail : x + block * PAIR * k;
            for (long t = 0; t < count; t += 2, turn ^= 1) {
                const bf16 *b = panel + t * laid, *beside = first + t + 1 < tiles ? b + laid : b;
                const Taken &done = both[turn ^ 1];
                const Columns left = columns(done.left), right = columns(done.right);
                // Vectors take so long that all of this is here by then.
                if (!by_tiles) touched.bring(block * PAIR, rows, row(first + t));
                coming.bring(row_of);
                if (by_bytes) {
                    four_by_bytes(bytes.at(block * PAIR, k), rows, (const uint8_t *)b, (const uint8_t *)beside, k, both[turn].c);
                    take_rows(done, left, right, 0, PAIR);
                } else {
                    four<false>(by_tiles, rows, from, from + 16 * k, 2 * k, 32, b, beside, SIZE, steps, both[turn].c,
                                [&](long i) { take_rows(done, left, right, i * each, (i + 1) * each); },
                                t || block + 1 == end ? 0 : 2 * PAIR * k);
                }
                both[turn].begin = block * PAIR, both[turn].rows = rows;
                both[turn].left = row(first + t), both[turn].right = row(first + t + 1);
            }
        }
        take_rows(both[turn ^ 1], columns(both[turn ^ 1].left), columns(both[turn ^ 1].right), 0, PAIR);
        both[turn ^ 1].rows = 0;
    }
}

}  // namespace
