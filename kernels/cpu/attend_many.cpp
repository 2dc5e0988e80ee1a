// attend_many: attention of many queries at one time, in products of tiles.
//
// Scores lie with a query in each lane, so that a softmax goes down them, and what it leaves is a right operand already. Letters: b rows of
// the batch, h heads over g of keys and values, d the width of a head, s queries, t entries.

#include <omp.h>

#include <algorithm>

#include "attend_many.h"
#include "many.h"

namespace {

// Entries whose scores are there at a time, and whose bias is; bytes of the keys and values that lie packed at a time.
constexpr long ENTRIES = 128, BIASED = 4096, PACKED = 32 << 20;
constexpr float LOG2E = 1.44269504f, NOTHING = -1e30f;

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
    const bool tiles = a.tiles && tiles_allowed();
    const float scale = a.scale * LOG2E;
    const __m512 by = _mm512_set1_ps(scale), none = _mm512_set1_ps(-INFINITY);
    __m512 top[2] = {none, none};
    for (long j = first; j < last; j += 32) {
        const bf16 *k = keys + (start + j) / 16 * steps * SIZE;
        const bf16 *q = bench.queries;
        four<false>(tiles, PAIR, k, k + steps * SIZE, 64, SIZE, q, q + steps * SIZE, SIZE, steps, bench.scores + j * PAIR, [](long) {});
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
            four<more()>(tiles, PAIR, v, v + SIZE, 64, channels * SIZE, p, p + ENTRIES * 16, SIZE, (last - first) / 32, sums, [](long) {});
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
#pragma omp for schedule(dynamic)
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
