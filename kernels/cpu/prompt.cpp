// A decoder layer for the many rows of a prompt, on a processor with AMX: products and attention of tiles, everything else on the way.
//
// project_many: x -> norm -> q k v, q and k turned.    attend_many: attention.    finish_many: o, residual, norm, gated MLP, residual.
//
// Weights stay as they are for decoding. Some of their rows at a time are laid across (int8 and int4 become bfloat16 on the way) into a
// panel near the core, which all rows of x then meet. Scores lie with a query in each lane, so that a softmax goes down them, and what it
// leaves is a right operand already. Letters: m rows of x, n rows of a matrix, k columns, b rows of the batch, h heads over g of keys and
// values, d the width of a head, s queries, t entries.

#include <omp.h>

#include <algorithm>
#include <new>
#include <vector>

#include "numbers.h"
#include "tiles.h"

namespace {

// Elements of a tile, rows of two of them, rows of x at a time, entries whose scores are there at a time, and whose bias is.
constexpr long SIZE = 512, PAIR = 32, MOST = 512, ENTRIES = 128, BIASED = 4096;
// Bytes of a panel, and of the keys and values that lie packed at a time.
constexpr long PANEL = 256 << 10, PACKED = 32 << 20;
constexpr float LOG2E = 1.44269504f, NOTHING = -1e30f;

long up(long x, long step) { return (x + step - 1) / step * step; }

// Memory that begins with a cache line, kept from call to call.
template <class T>
struct Kept {
    std::vector<T> all;
    T *of(long size) {
        if ((long)all.size() < size + 64) all.resize(size + 64);
        return (T *)(((uintptr_t)all.data() + 63) & ~(uintptr_t)63);
    }
};

// c[32][32] = two tiles of a, one below the other, times two of b, one beside the other, over so many steps of 32 columns. What is to be
// done meanwhile, `aside` does at every step: tiles leave the other units idle.
template <bool MORE, class Aside>
void four(const bf16 *a, const bf16 *below, long bytes, long a_step, const bf16 *b, const bf16 *beside, long b_step, long steps, float *c,
          Aside aside) {
    float *under = c + 16 * PAIR;
    if (MORE) {
        TILE_LOAD(0, c, 4 * PAIR);
        TILE_LOAD(1, c + 16, 4 * PAIR);
        TILE_LOAD(2, under, 4 * PAIR);
        TILE_LOAD(3, under + 16, 4 * PAIR);
    } else {
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
    }
    for (long i = 0; i < steps; i++) {
        TILE_LOAD(6, b + i * b_step, 64);
        TILE_LOAD(4, a + i * a_step, bytes);
        TILE_LOAD(7, beside + i * b_step, 64);
        TILE_LOAD(5, below + i * a_step, bytes);
        TILE_ADD(0, 4, 6);
        TILE_ADD(1, 4, 7);
        TILE_ADD(2, 5, 6);
        TILE_ADD(3, 5, 7);
        aside(i);
    }
    TILE_STORE(0, c, 4 * PAIR);
    TILE_STORE(1, c + 16, 4 * PAIR);
    TILE_STORE(2, under, 4 * PAIR);
    TILE_STORE(3, under + 16, 4 * PAIR);
}

// Lanes of `even` and `odd` by turns.
__m512i in_turn(__m512 even, __m512 odd) {
    alignas(64) static constexpr uint16_t turns[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(turns), (__m512i)_mm512_cvtne2ps_pbh(odd, even));
}

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
    if (a.kind == WIDE) across((const bf16 *)a.weights + row * k, k, rows, k, to);
    if (a.kind == INT8) int8_across((const int8_t *)a.weights + row * k, rows, k, to);
    if (a.kind == INT4) int4_across(a, row / TILE, to);
}

// What belongs to sixteen columns of a product.
struct Columns {
    long at;
    __mmask16 lanes;
    __m512 scale, bias;
    bool scaled;
    Columns(const Matrix &a, long at) : at(at), lanes(live(std::max(0l, a.rows - at))), scaled(a.kind == INT8) {
        scale = scaled ? wide(lanes, a.scales + at) : _mm512_set1_ps(1);
        bias = a.bias ? wide(lanes, a.bias + at) : _mm512_setzero_ps();
    }
    __m512 operator()(const float *c) const { return _mm512_fmadd_ps(_mm512_load_ps(c), scale, bias); }
};

// An even number of tiles for a panel, so that the threads end together.
long panel_tiles(long tiles, long k, long threads) {
    const long most = std::max(2l, PANEL / (k * 2 * TILE) / 2 * 2);
    long best = 2, cost = tiles * threads * 2;
    for (long size = 2; size <= most; size += 2) {
        const long each = (up(tiles, size) / size + threads - 1) / threads * size;
        if (each <= cost) best = size, cost = each;
    }
    return best;
}

// A product of 32 rows and 32 columns that is yet to be taken.
struct Taken {
    alignas(64) float c[PAIR * PAIR];
    long begin, rows, left, right;
};

// x[m, k] times a matrix, its tiles in the order of `row_of`: take(row of x, first column and what belongs to sixteen, twice, and values).
// To be called by all threads of a region, which wait for each other at the end.
template <class RowOf, class Take>
void multiply(const Matrix &a, const bf16 *x, long m, long tiles, RowOf row_of, Take take) {
    static thread_local Kept<bf16> panels, tails;
    const long k = a.columns, steps = k / 32, threads = omp_get_num_threads(), size = panel_tiles(tiles, k, threads);
    const long panels_all = up(tiles, size) / size, blocks = up(m, PAIR) / PAIR;
    const long parts = std::min(blocks, (threads + panels_all - 1) / panels_all);
    bf16 *panel = panels.of(size * k * TILE), *tail = tails.of(PAIR * k);
    if (m % PAIR) {
        const long rest = m % PAIR * k;
        std::copy_n(x + m / PAIR * PAIR * k, rest, tail);
        std::fill_n(tail + rest, PAIR * k - rest, (bf16)0);
    }
    const auto row = [=](long t) { return t < tiles ? row_of(t) : a.rows; };
    Taken both[2];
    for (Taken &one : both) one.rows = one.left = one.right = 0;
    long turn = 0;
    const long each = (PAIR + steps - 1) / steps;
    const auto take_rows = [&](const Taken &done, const Columns &left, const Columns &right, long from, long to) {
        for (long i = from; i < std::min(to, done.rows); i++)
            take(done.begin + i, left, right, left(done.c + i * PAIR), right(done.c + i * PAIR + 16));
    };
#pragma omp for schedule(static, 1)
    for (long task = 0; task < panels_all * parts; task++) {
        const long first = task / parts * size, count = std::min(size, up(tiles - first, 2)), part = task % parts;
        const long begin = blocks * part / parts, end = blocks * (part + 1) / parts;
        for (long t = first; t < std::min(first + count, tiles); t++) lay_across(a, row_of(t), panel + (t - first) * k * TILE);
        for (long block = begin; block < end; block++) {
            const long rows = std::min(PAIR, m - block * PAIR);
            const bf16 *from = rows < PAIR ? tail : x + block * PAIR * k;
            for (long t = 0; t < count; t += 2, turn ^= 1) {
                const bf16 *b = panel + t * k * TILE;
                const Taken &done = both[turn ^ 1];
                const Columns left(a, done.left), right(a, done.right);
                four<false>(from, from + 16 * k, 2 * k, 32, b, first + t + 1 < tiles ? b + k * TILE : b, SIZE, steps, both[turn].c,
                            [&](long i) { take_rows(done, left, right, i * each, (i + 1) * each); });
                both[turn].begin = block * PAIR, both[turn].rows = rows;
                both[turn].left = row(first + t), both[turn].right = row(first + t + 1);
            }
        }
        take_rows(both[turn ^ 1], Columns(a, both[turn ^ 1].left), Columns(a, both[turn ^ 1].right), 0, PAIR);
        both[turn ^ 1].rows = 0;
    }
}

void normalised(const bf16 *x, const bf16 *weight, float eps, long width, bf16 *out) {
    __m512 square = _mm512_setzero_ps();
    for (long c = 0; c < width; c += 16) {
        const __m512 one = wide(live(width - c), x + c);
        square = _mm512_fmadd_ps(one, one, square);
    }
    const __m512 inverse = _mm512_set1_ps(1 / std::sqrt(_mm512_reduce_add_ps(square) / width + eps));
    for (long c = 0; c < width; c += 16) {
        const __mmask16 lanes = live(width - c);
        narrow(lanes, _mm512_mul_ps(_mm512_mul_ps(wide(lanes, x + c), inverse), wide(lanes, weight + c)), out + c);
    }
}

void turned(bf16 *head, const bf16 *cosine, const bf16 *sine, float scale, long half) {
    const __m512 by = _mm512_set1_ps(scale);
    for (long c = 0; c < half; c += 16) {
        const __mmask16 lanes = live(half - c);
        const __m512 left = wide(lanes, head + c), right = wide(lanes, head + half + c);
        const __m512 cs = _mm512_mul_ps(by, wide(lanes, cosine + c)), sn = _mm512_mul_ps(by, wide(lanes, sine + c));
        narrow(lanes, _mm512_fmsub_ps(left, cs, _mm512_mul_ps(right, sn)), head + c);
        narrow(lanes, _mm512_fmadd_ps(right, cs, _mm512_mul_ps(left, sn)), head + half + c);
    }
}

// 2^x within some hundred-thousandths, as what it gives is rounded to bfloat16; 0 below -126, where numbers would be slow.
// Of two operands the second is given back where one is no number.
__m512 power(__m512 x) {
    const __mmask16 some = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126), _CMP_NLT_UQ);
    x = _mm512_max_ps(_mm512_set1_ps(-126), x);
    const __m512 n = _mm512_roundscale_ps(x, 0), f = _mm512_sub_ps(x, n);
    __m512 y = _mm512_set1_ps(9.618437357e-3f);
    for (float c : {5.550332548e-2f, 2.402264791e-1f, 6.931472028e-1f, 1.f}) y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(c));
    return _mm512_maskz_scalef_ps(some, y, n);
}

}  // namespace

// Where one side of attention lies: strides from row to row of the batch, from head to head, and from token to token, in elements.
struct Strides {
    long row, head, token;
};

// `behind`: query i sees the entries up to i + behind, unless there is a bias [s, t] for it, which then says it all.
struct Attention {
    const bf16 *queries, *keys, *values, *bias;
    Strides query, key, value, biased;
    long b, h, g, s, t, d, behind;
    float scale;
};

namespace {

// Keys and values of one head as left operands: keys [t / 16, d / 32, 16 keys, 32 channels], values [t / 32, d / 16, 16 channels, 32 keys].
struct Packed {
    long steps, channels, tokens;
    explicit Packed(const Attention &a) : steps(up(a.d, 32) / 32), channels(2 * steps), tokens(up(a.t, 32)) {}
    long size() const { return tokens * steps * 32; }

    // 32 tokens from `start` on.
    void pack(const Attention &a, const bf16 *keys, const bf16 *values, long start, bf16 *k, bf16 *v) const {
        const __m512i none = _mm512_setzero_si512();
        for (long j = 0; j < 32; j++)
            for (long c = 0; c < steps; c++) {
                const __mmask32 lanes = a.d - c * 32 >= 32 ? ~0u : (1u << (a.d - c * 32)) - 1;
                const long token = start + j;
                const __m512i one = token < a.t ? _mm512_maskz_loadu_epi16(lanes, keys + token * a.key.token + c * 32) : none;
                _mm512_store_si512(k + (token / 16 * steps + c) * SIZE + token % 16 * 32, one);
            }
        for (long c = 0; c < channels; c++) {
            const __mmask16 lanes = live(std::max(0l, a.d - c * 16));
            __m512i r[16];
            for (long j = 0; j < 16; j++) {
                const long token = start + 2 * j;
                const bf16 *from = values + token * a.value.token + c * 16;
                const __m256i even = token < a.t ? _mm256_maskz_loadu_epi16(lanes, from) : _mm256_setzero_si256();
                const __m256i odd = token + 1 < a.t ? _mm256_maskz_loadu_epi16(lanes, from + a.value.token) : _mm256_setzero_si256();
                r[j] = _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
            }
            transpose(r);
            for (int j = 0; j < 16; j++) _mm512_store_si512(v + (start / 32 * channels + c) * SIZE + j * 32, r[j]);
        }
    }
};

// The first of some entries that any of 32 queries sees, and the end of those.
struct Span {
    long first, last;
};

// What a thread works in: 32 queries of a head over ENTRIES entries.
struct Bench {
    bf16 *queries, *shares;
    float *scores, *sums, *bias;
    Span *spans;
};

// Some entries' bias, times log2 e, with a query in each lane; which of them, in whole steps of 32, any query sees.
Span turned_bias(const Attention &a, long row, long query, long start, long count, float *to) {
    long first = count, last = 0;
    for (long j = 0; j < count; j += 16)
        for (long half = 0; half < 2; half++) {
            __m512i r[16];
            for (long i = 0; i < 16; i++) {
                const long at = query + half * 16 + i;
                const bf16 *from = a.bias + row * a.biased.row + at * a.biased.token + start + j;
                const __m512 one = at < a.s ? wide(live(count - j), from) : _mm512_set1_ps(-INFINITY);
                const __mmask16 none = at < a.s ? ~live(count - j) : 0;
                const __m512 held = _mm512_mask_mov_ps(one, none, _mm512_set1_ps(-INFINITY));
                if (_mm512_cmp_ps_mask(held, _mm512_set1_ps(-INFINITY), _CMP_NEQ_UQ)) first = std::min(first, j), last = j + 16;
                r[i] = _mm512_castps_si512(_mm512_mul_ps(held, _mm512_set1_ps(LOG2E)));
            }
            transpose(r);
            for (int i = 0; i < 16; i++) _mm512_store_si512(to + (j + i) * PAIR + half * 16, r[i]);
        }
    return {first / 32 * 32, std::min(up(last, 32), up(count, 32))};
}

// 32 queries of a head over entries `first` to `last` of those from `start` on, added to what they saw before.
void look(const Attention &a, const Packed &packed, const Bench &bench, const bf16 *keys, const bf16 *values, long query, long start,
          long first, long last, bool begun, __m512 (&most)[2], __m512 (&all)[2]) {
    const long steps = packed.steps, channels = packed.channels, count = std::min(a.t - start, last);
    const float scale = a.scale * LOG2E;
    const __m512 by = _mm512_set1_ps(scale), none = _mm512_set1_ps(-INFINITY);
    __m512 top[2] = {none, none};
    for (long j = first; j < last; j += 32) {
        const bf16 *k = keys + (start + j) / 16 * steps * SIZE;
        const bf16 *q = bench.queries;
        four<false>(k, k + steps * SIZE, 64, SIZE, q, q + steps * SIZE, SIZE, steps, bench.scores + j * PAIR, [](long) {});
    }
    for (long j = first; j < last; j++) {
        float *scores = bench.scores + j * PAIR;
        const float *bias = bench.bias + j * PAIR;
        // lane i is query + i, which sees up to query + i + behind
        const long hidden = a.bias ? 0 : start + j - a.behind - query;
        const bool whole = j < count && hidden <= 0;
        const uint32_t lanes = whole ? ~0u : j >= count || hidden > 31 ? 0 : ~0u << hidden;
        for (int half = 0; half < 2; half++) {
            __m512 one = _mm512_load_ps(scores + 16 * half);
            if (a.bias) one = _mm512_fmadd_ps(one, by, _mm512_load_ps(bias + 16 * half));
            if (!whole) one = _mm512_mask_mov_ps(none, lanes >> 16 * half, one);
            if (a.bias || !whole) _mm512_store_ps(scores + 16 * half, one);
            top[half] = _mm512_max_ps(top[half], one);
        }
    }
    // Scores without a bias are yet to be scaled.
    const __m512 rest = a.bias ? _mm512_set1_ps(1) : by;
    for (int half = 0; half < 2; half++) {
        const __m512 now = _mm512_max_ps(most[half], _mm512_mul_ps(top[half], rest)), share = power(_mm512_sub_ps(most[half], now));
        most[half] = now;
        __m512 sum = _mm512_mul_ps(all[half], share);
        if (begun)
            for (long c = 0; c < channels * 16; c++) {
                float *one = bench.sums + c * PAIR + 16 * half;
                _mm512_store_ps(one, _mm512_mul_ps(_mm512_load_ps(one), share));
            }
        bf16 *shares = bench.shares + half * ENTRIES * 16;
        for (long j = first; j < last; j += 2) {
            const float *scores = bench.scores + j * PAIR + 16 * half;
            const __m512 even = power(_mm512_fmsub_ps(_mm512_load_ps(scores), rest, now));
            const __m512 odd = power(_mm512_fmsub_ps(_mm512_load_ps(scores + PAIR), rest, now));
            sum = _mm512_add_ps(sum, _mm512_add_ps(even, odd));
            _mm512_store_si512(shares + j * 16, in_turn(even, odd));
        }
        all[half] = sum;
    }
    for (long c = 0; c < channels; c += 2) {
        const bf16 *v = values + ((start + first) / 32 * channels + c) * SIZE, *p = bench.shares + first * 16;
        const auto add = [&](auto more) {
            float *sums = bench.sums + c * 16 * PAIR;
            four<more()>(v, v + SIZE, 64, channels * SIZE, p, p + ENTRIES * 16, SIZE, (last - first) / 32, sums, [](long) {});
        };
        begun ? add(std::true_type()) : add(std::false_type());
    }
}

// What 32 queries of a head saw, [d, 32] over its sum, to their places in out[s, h, d].
void give(const Attention &a, const Bench &bench, const __m512 (&all)[2], long query, bf16 *out) {
    for (int half = 0; half < 2; half++) {
        const __mmask16 some = _mm512_cmp_ps_mask(all[half], _mm512_setzero_ps(), _CMP_NEQ_UQ);
        const __m512 share = _mm512_maskz_div_ps(some, _mm512_set1_ps(1), all[half]);
        for (long c = 0; c < a.d; c += 16) {
            __m512i r[16];
            for (int i = 0; i < 16; i++) {
                const __m512 sum = _mm512_load_ps(bench.sums + (c + i) * PAIR + 16 * half);
                r[i] = _mm512_castps_si512(_mm512_maskz_mul_ps(some, share, sum));
            }
            transpose(r);
            const long rows = std::clamp(a.s - query - 16 * half, 0l, 16l);
            for (long i = 0; i < rows; i++) narrow(live(a.d - c), _mm512_castsi512_ps(r[i]), out + (query + 16 * half + i) * a.h * a.d + c);
        }
    }
}

// Heads `from` to `to` of those that share keys and values, for 32 queries.
void see(const Attention &a, const Packed &packed, const Bench &bench, const bf16 *keys, const bf16 *values, long row, long from, long to,
         long query, bf16 *out) {
    const long queries = std::min(32l, a.s - query), seen = a.bias ? a.t : std::min(a.t, query + queries + a.behind), count = to - from;
    for (long head = 0; head < count; head++) {
        const bf16 *q = a.queries + row * a.query.row + (from + head) * a.query.head + query * a.query.token;
        across(q, a.query.token, std::min(16l, queries), a.d, bench.queries);
        across(q + 16 * a.query.token, a.query.token, std::max(0l, queries - 16), a.d, bench.queries + packed.steps * SIZE);
        __m512 most[2] = {_mm512_set1_ps(NOTHING), _mm512_set1_ps(NOTHING)}, all[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        bool begun = false;
        for (long start = 0; start < seen; start += ENTRIES) {
            const long some = std::min(ENTRIES, seen - start);
            // Heads share a bias, which is laid out once where there is room for all of it.
            const bool kept = a.bias && a.t <= BIASED;
            Bench here = bench;
            here.bias += kept ? start * PAIR : 0;
            Span &span = bench.spans[kept ? start / ENTRIES : 0];
            if (!a.bias) span = {0, up(some, 32)};
            if (a.bias && !(kept && head)) span = turned_bias(a, row, query, start, some, here.bias);
            if (span.first >= span.last) continue;
            look(a, packed, here, keys, values, query, start, span.first, span.last, begun, most, all);
            begun = true;
        }
        if (!begun) std::fill_n(bench.sums, packed.channels * 16 * PAIR, 0.f);
        give(a, bench, all, query, out + row * a.s * a.h * a.d + (from + head) * a.d);
    }
}

}  // namespace

extern "C" {

long prompts() { return tiles_allowed(); }

// out[m, n] = x[m, k] a^T + bias.
void product_many(const Matrix *a, const bf16 *x, bf16 *out, long m) {
    const long n = a->rows;
#pragma omp parallel
    {
        Tiles tiles(16);
        multiply(*a, x, m, up(n, TILE) / TILE, [](long t) { return t * TILE; },
                 [=](long i, const Columns &left, const Columns &right, __m512 one, __m512 two) {
                     narrow(left.lanes, one, out + i * n + left.at);
                     narrow(right.lanes, two, out + i * n + right.at);
                 });
    }
}

// out[m, h + 2 g, d] from the stream x[m, width]; cosine and sine are [m, d / 2].
void project_many(const Layer *layer, const bf16 *x, const bf16 *cosine, const bf16 *sine, bf16 *out, long m) {
    static thread_local Kept<bf16> kept;
    const long width = layer->width, d = layer->head_dim, turning = layer->heads + layer->kv_heads, n = (turning + layer->kv_heads) * d;
    bf16 *normed = kept.of(std::min(m, MOST) * width);
    for (long begin = 0; begin < m; begin += MOST) {
        const long rows = std::min(MOST, m - begin);
        bf16 *to = out + begin * n;
#pragma omp parallel
        {
            Tiles tiles(16);
#pragma omp for schedule(static)
            for (long i = 0; i < rows; i++) normalised(x + (begin + i) * width, layer->norm1, layer->eps, width, normed + i * width);
            multiply(layer->qkv, normed, rows, up(n, TILE) / TILE, [](long t) { return t * TILE; },
                     [=](long i, const Columns &left, const Columns &right, __m512 one, __m512 two) {
                         narrow(left.lanes, one, to + i * n + left.at);
                         narrow(right.lanes, two, to + i * n + right.at);
                     });
#pragma omp for schedule(static)
            for (long i = 0; i < rows; i++)
                for (long head = 0; head < turning; head++) {
                    bf16 *values = to + i * n + head * d;
                    const bool asks = head < layer->heads;
                    const bf16 *norm = asks ? layer->q_norm : layer->k_norm;
                    if (norm) normalised(values, norm, layer->eps, d, values);
                    turned(values, cosine + (begin + i) * d / 2, sine + (begin + i) * d / 2, asks ? layer->query_scale : 1, d / 2);
                }
        }
    }
}

// out[m, width] = y + mlp(norm2(y)), y = x + o(seen).
void finish_many(const Layer *layer, const bf16 *x, const bf16 *seen, bf16 *out, long m) {
    static thread_local Kept<bf16> kept;
    const long width = layer->width, inner = layer->inner, from = layer->heads * layer->head_dim, most = std::min(m, MOST);
    const long a_row = up(width, 32);
    bf16 *stream = kept.of(most * (2 * a_row + inner)), *normed = stream + most * a_row, *gated = normed + most * a_row;
    const bool gelu = layer->gelu;
    const auto in_order = [](long t) { return t * TILE; };
    for (long begin = 0; begin < m; begin += MOST) {
        const long rows = std::min(MOST, m - begin);
        const bf16 *before = x + begin * width;
        bf16 *after = out + begin * width;
        const auto added = [=](const bf16 *to, bf16 *sum) {
            return [=](long i, const Columns &left, const Columns &right, __m512 one, __m512 two) {
                narrow(left.lanes, _mm512_add_ps(one, wide(left.lanes, to + i * width + left.at)), sum + i * width + left.at);
                narrow(right.lanes, _mm512_add_ps(two, wide(right.lanes, to + i * width + right.at)), sum + i * width + right.at);
            };
        };
#pragma omp parallel
        {
            Tiles tiles(16);
            multiply(layer->o, seen + begin * from, rows, up(width, TILE) / TILE, in_order, added(before, stream));
#pragma omp for schedule(static)
            for (long i = 0; i < rows; i++) normalised(stream + i * width, layer->norm2, layer->eps, width, normed + i * width);
            // A tile of gate stands beside the same of up.
            multiply(layer->gate_up, normed, rows, 2 * inner / TILE, [=](long t) { return t / 2 * TILE + t % 2 * inner; },
                     [=](long i, const Columns &left, const Columns &, __m512 gate, __m512 up) {
                         narrow(0xffff, _mm512_mul_ps(active(gate, gelu), up), gated + i * inner + left.at);
                     });
            multiply(layer->down, gated, rows, up(width, TILE) / TILE, in_order, added(stream, after));
        }
    }
}

// out[b, s, h, d]: softmax(q k^T scale) v. What sees nothing becomes 0.
void attend_many(const Attention *given, bf16 *out) {
    static thread_local Kept<bf16> kept;
    const Attention &a = *given;
    const Packed packed(a);
    const long pairs = a.b * a.g, share = a.h / a.g, size = packed.size(), wave = std::clamp(PACKED / (4 * size), 1l, pairs);
    const long blocks = up(a.s, 32) / 32;
    bf16 *keys = kept.of(2 * wave * size), *values = keys + wave * size;
    for (long begin = 0; begin < pairs; begin += wave) {
        const long some = std::min(wave, pairs - begin);
#pragma omp parallel
        {
            static thread_local Kept<bf16> small;
            static thread_local Kept<float> large;
            static thread_local Kept<Span> spans;
            const long pieces = packed.tokens / 32;
#pragma omp for schedule(static)
            for (long task = 0; task < some * pieces; task++) {
                const long pair = task / pieces, row = (begin + pair) / a.g, head = (begin + pair) % a.g;
                packed.pack(a, a.keys + row * a.key.row + head * a.key.head, a.values + row * a.value.row + head * a.value.head,
                            task % pieces * 32, keys + pair * size, values + pair * size);
            }
            Tiles tiles(16);
            const long wide = packed.channels * 16;
            bf16 *one = small.of(wide * PAIR + ENTRIES * PAIR);
            float *two = large.of((ENTRIES + wide + (a.bias ? up(std::min(a.t, BIASED), ENTRIES) : 0)) * PAIR);
            const Bench bench{one, one + wide * PAIR, two, two + ENTRIES * PAIR, two + (ENTRIES + wide) * PAIR, spans.of(BIASED / ENTRIES)};
            const long alone = some * blocks < 4 * omp_get_num_threads() ? share : 1;
#pragma omp for schedule(dynamic)
            for (long task = 0; task < some * blocks * alone; task++) {
                // The last queries see the most, so that they go first.
                const long query = (blocks - 1 - task / (some * alone)) * 32, pair = task / alone % some, part = task % alone;
                const long row = (begin + pair) / a.g, head = (begin + pair) % a.g * share;
                const long from = alone == 1 ? head : head + part, to = alone == 1 ? head + share : from + 1;
                see(a, packed, bench, keys + pair * size, values + pair * size, row, from, to, query, out);
            }
        }
    }
}

}
