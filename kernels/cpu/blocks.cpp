// attend_blocks: attention over the blocks that a mask names, and over nothing else, of float32 or bfloat16, summed in float32.
//
// A task is up to 64 queries of one row of blocks. Queries stand side by side in vectors, so that a softmax goes down them, and keys are
// read where they lie, one number for 64 queries: nothing is gathered. Scores of 64 keys are there at a time, with a running maximum. Of
// bfloat16 two channels, and then two keys, are one number of 32 bits. Letters: b rows of the batch, h heads over g of keys and values,
// s queries, t entries, d the width of a head.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "numbers.h"
#include "tiles.h"

// queries [b, h, s, d], keys and values [b, g, t, d], each in one piece, bfloat16 where `half`; mask [b, h, rows, columns]; row r of a head
// holds the queries from row_starts[b, h, r] to the next, column c of a shared head the keys from key_starts[b, g, c] to the next.
struct Blocked {
    const void *queries, *keys, *values;
    const uint8_t *mask;
    const long *row_starts, *key_starts;
    long b, h, g, s, t, d, rows, columns, half;
    float scale;
};

namespace {

// Queries of a task, and keys whose scores are there at a time.
constexpr long QUERIES = 64, KEYS = 64, LANES = 16;

// Numbers of T in 32 bits: a step along channels or keys.
template <class T>
constexpr long STEP = 4 / sizeof(T);

// What a thread works in: queries [d / STEP, 64, STEP], scores [64 keys, 64], their shares [64 / STEP, 64, STEP], which of float32 lie
// where the scores did, values [64 / STEP, d, STEP], and what was seen [d, 64].
template <class T>
struct Room {
    T *across, *shares, *values;
    float *scores, *seen;
};

template <class T>
__m512 one_for_all(const T *from) {
    int32_t bits;
    __builtin_memcpy(&bits, from, 4);
    return _mm512_castsi512_ps(_mm512_set1_epi32(bits));
}

__m512 added(__m512 sum, __m512 one, __m512 other, const float *) { return _mm512_fmadd_ps(one, other, sum); }
__m512 added(__m512 sum, __m512 one, __m512 other, const bf16 *) {
    return _mm512_dpbf16_ps(sum, pair(_mm512_castps_si512(one)), pair(_mm512_castps_si512(other)));
}

// sums[n][i] += the products of `count` steps of G vectors and N numbers, `apart` from one number to the next, `along` from step to step.
template <class T, int G, int N>
__attribute__((always_inline)) inline void multiplied(const T *vectors, const T *numbers, long apart, long along, long count,
                                                      __m512 (&sums)[N][G]) {
    for (long step = 0; step < count; step++) {
        __m512 vector[G];
        for (int i = 0; i < G; i++) vector[i] = _mm512_load_ps(vectors + (step * QUERIES + i * LANES) * STEP<T>);
        for (int n = 0; n < N; n++) {
            const __m512 number = one_for_all(numbers + step * along + n * apart);
            for (int i = 0; i < G; i++) sums[n][i] = added(sums[n][i], number, vector[i], numbers);
        }
    }
}

template <class T, int G, int N>
void score(const Room<T> &room, const T *keys, long d, float scale, float *scores) {
    __m512 sums[N][G];
    for (auto &row : sums)
        for (auto &sum : row) sum = _mm512_setzero_ps();
    multiplied<T, G, N>(room.across, keys, d, STEP<T>, d / STEP<T>, sums);
    for (int n = 0; n < N; n++)
        for (int i = 0; i < G; i++) _mm512_store_ps(scores + n * QUERIES + i * LANES, _mm512_mul_ps(sums[n][i], _mm512_set1_ps(scale)));
}

// Adds to N channels of what was seen the shares of `count` steps of values, after what there was has been made smaller.
template <class T, int G, int N>
void mix(const Room<T> &room, const T *values, long d, long count, const __m512 *smaller, float *seen) {
    __m512 sums[N][G];
    for (int n = 0; n < N; n++)
        for (int i = 0; i < G; i++) sums[n][i] = _mm512_mul_ps(smaller[i], _mm512_load_ps(seen + n * QUERIES + i * LANES));
    multiplied<T, G, N>(room.shares, values, STEP<T>, STEP<T> * d, count, sums);
    for (int n = 0; n < N; n++)
        for (int i = 0; i < G; i++) _mm512_store_ps(seen + n * QUERIES + i * LANES, sums[n][i]);
}

// Two vectors of float32 as bfloat16, the first in the lower halves.
__m512i in_pairs(__m512 one, __m512 other) {
    const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(one));
    return _mm512_or_si512(low, _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(other)), 16));
}

// Scores of sixteen queries become shares relative to the largest; their sum.
__m512 shared(const Room<float> &room, long i, long count, __m512 top) {
    __m512 sum = _mm512_setzero_ps();
    for (long j = 0; j < count; j++) {
        const __m512 share = exponential(_mm512_sub_ps(_mm512_load_ps(room.scores + j * QUERIES + i * LANES), top));
        _mm512_store_ps(room.shares + j * QUERIES + i * LANES, share);
        sum = _mm512_add_ps(sum, share);
    }
    return sum;
}
__m512 shared(const Room<bf16> &room, long i, long count, __m512 top) {
    __m512 sum = _mm512_setzero_ps();
    for (long j = 0; j < count; j += 2) {
        __m512 share[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        for (long k = 0; k < std::min(2l, count - j); k++) {
            share[k] = exponential(_mm512_sub_ps(_mm512_load_ps(room.scores + (j + k) * QUERIES + i * LANES), top));
            sum = _mm512_add_ps(sum, share[k]);
        }
        _mm512_store_si512(room.shares + j * QUERIES + i * LANES * 2, in_pairs(share[0], share[1]));
    }
    return sum;
}

// Values as `mix` reads them: float32 where they lie, of bfloat16 two keys side by side, the last one with nothing.
const float *laid(const Room<float> &, const float *values, long, long) { return values; }
const bf16 *laid(const Room<bf16> &room, const bf16 *values, long d, long count) {
    for (long j = 0; j < count; j += 2)
        for (long c = 0; c < d; c += LANES) {
            const bf16 *from = values + j * d + c;
            const __m512i even = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(live(d - c), from));
            const __m256i odd = j + 1 < count ? _mm256_maskz_loadu_epi16(live(d - c), from + d) : _mm256_setzero_si256();
            _mm512_storeu_si512(room.values + (j * d + 2 * c), _mm512_or_si512(even, _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16)));
        }
    return room.values;
}

// G vectors of queries over `count` keys, added to what they saw before.
template <class T, int G>
void look(const Room<T> &room, const T *keys, const T *values, long d, long count, float scale, __m512 *most, __m512 *all) {
    long j = 0;
    for (; j + 4 <= count; j += 4) score<T, G, 4>(room, keys + j * d, d, scale, room.scores + j * QUERIES);
    for (; j < count; j++) score<T, G, 1>(room, keys + j * d, d, scale, room.scores + j * QUERIES);
    __m512 smaller[G];
    for (int i = 0; i < G; i++) {
        __m512 top = most[i];
        for (j = 0; j < count; j++) top = _mm512_max_ps(top, _mm512_load_ps(room.scores + j * QUERIES + i * LANES));
        smaller[i] = exponential(_mm512_sub_ps(most[i], top));
        most[i] = top;
        all[i] = _mm512_fmadd_ps(all[i], smaller[i], shared(room, i, count, top));
    }
    const T *lying = laid(room, values, d, count);
    const long steps = (count + STEP<T> - 1) / STEP<T>;
    long c = 0;
    for (; c + 4 <= d; c += 4) mix<T, G, 4>(room, lying + c * STEP<T>, d, steps, smaller, room.seen + c * QUERIES);
    for (; c < d; c++) mix<T, G, 1>(room, lying + c * STEP<T>, d, steps, smaller, room.seen + c * QUERIES);
}

// `count` queries [count, d] side by side, in steps of 32 bits; where there are none, zeros.
template <class T>
void spread(const T *queries, long count, long d, T *across) {
    const long steps = d / STEP<T>;
    for (long i = 0; i < count; i += LANES)
        for (long c = 0; c < steps; c += LANES) {
            __m512i r[16];
            for (long lane = 0; lane < LANES; lane++) {
                const T *from = queries + (i + lane) * d + c * STEP<T>;
                r[lane] = i + lane < count ? _mm512_maskz_loadu_epi32(live(steps - c), from) : _mm512_setzero_si512();
            }
            transpose(r);
            for (long lane = 0; lane < LANES; lane++) _mm512_store_si512(across + ((c + lane) * QUERIES + i) * STEP<T>, r[lane]);
        }
}

void written(__mmask16 lanes, __m512 from, float *to) { _mm512_mask_storeu_ps(to, lanes, from); }
void written(__mmask16 lanes, __m512 from, bf16 *to) { narrow(lanes, from, to); }

// What `count` queries saw, over the sum of their shares, to [count, d].
template <class T>
void give(const Room<T> &room, const __m512 *all, long count, long d, T *out) {
    for (long i = 0; i < count; i += LANES)
        for (long c = 0; c < d; c += LANES) {
            __m512i r[16];
            for (long lane = 0; lane < LANES; lane++)
                r[lane] = _mm512_castps_si512(_mm512_div_ps(_mm512_load_ps(room.seen + (c + lane) * QUERIES + i), all[i / LANES]));
            transpose(r);
            for (long lane = 0; lane < std::min(LANES, count - i); lane++)
                written(live(d - c), _mm512_castsi512_ps(r[lane]), out + (i + lane) * d + c);
        }
}

// A head's keys and values, and which of their columns a row reads.
template <class T>
struct Read {
    const T *keys, *values;
    const uint8_t *mask;
    const long *starts;
};

// Up to 16 G queries over what they read; neighbouring columns are one stretch.
template <class T, int G>
void see(const Blocked &a, const Room<T> &room, const T *queries, long count, const Read<T> &read, T *out) {
    __m512 most[G], all[G];
    for (int i = 0; i < G; i++) most[i] = _mm512_set1_ps(-INFINITY), all[i] = _mm512_setzero_ps();
    spread(queries, count, a.d, room.across);
    std::fill_n(room.seen, (a.d + LANES) * QUERIES, 0.f);
    bool any = false;
    for (long column = 0; column < a.columns; column++) {
        if (!read.mask[column]) continue;
        const long first = read.starts[column];
        while (column + 1 < a.columns && read.mask[column + 1]) column++;
        const long last = read.starts[column + 1];
        any = any || first < last;
        for (long j = first; j < last; j += KEYS)
            look<T, G>(room, read.keys + j * a.d, read.values + j * a.d, a.d, std::min(KEYS, last - j), a.scale, most, all);
    }
    if (any) give(room, all, count, a.d, out);
    else std::fill_n(out, count * a.d, T(0));
}

template <class T>
void attended(const Blocked &a, T *out) {
    const long owners = a.b * a.h, share = a.h / a.g;
#pragma omp parallel
    {
        static thread_local Kept<float> kept;
        const long wide = (a.d + 2 * LANES) * QUERIES, square = KEYS * QUERIES;
        float *mine = kept.of(3 * wide + 2 * square);
        float *shares = std::is_same_v<T, float> ? mine : mine + square;
        const Room<T> room{(T *)(mine + 2 * square), (T *)shares, (T *)(mine + 2 * square + wide), mine, mine + 2 * square + 2 * wide};
#pragma omp for schedule(dynamic)
        for (long task = 0; task < owners * a.rows; task++) {
            const long owner = task / a.rows, row = task % a.rows, shared = owner / a.h * a.g + owner % a.h / share;
            const long *bounds = a.row_starts + owner * (a.rows + 1) + row, begin = shared * a.t * a.d;
            const Read<T> read{(const T *)a.keys + begin, (const T *)a.values + begin, a.mask + task * a.columns,
                               a.key_starts + shared * (a.columns + 1)};
            for (long first = bounds[0]; first < bounds[1]; first += QUERIES) {
                const long count = std::min(QUERIES, bounds[1] - first), at = (owner * a.s + first) * a.d;
                const auto wave = count > 48 ? see<T, 4> : count > 32 ? see<T, 3> : count > 16 ? see<T, 2> : see<T, 1>;
                wave(a, room, (const T *)a.queries + at, count, read, out + at);
            }
        }
    }
}

}  // namespace

extern "C" {

// out [b, h, s, d]. Queries whose row reads nothing get 0.
void attend_blocks(const Blocked *given, void *out) {
    given->half ? attended(*given, (bf16 *)out) : attended(*given, (float *)out);
}

}
