// Products of a matrix with a few rows of x, summed in float32: by vectors, where reading the matrix is all that costs, else by tiles.
// Either way goes in one order, whatever rows there are beside a row; the two ways differ in it.

#pragma once

#include <omp.h>

#include <algorithm>
#include <vector>

#include "numbers.h"
#include "tiled.h"

namespace {

// Rows of a matrix that stay near, and bytes of it that are brought near ahead of their turn.
constexpr long NEAR = 64, AHEAD = 16 << 10;

// From how many rows of x on tiles are faster, by kind of matrix. Found on a Xeon with AMX, on one thread.
constexpr long TILED_FROM[] = {5, 6, 1};
bool tiled(const Matrix &a, long m) { return a.tiles && m >= TILED_FROM[a.kind] && (a.kind != INT4 || a.group % 32 == 0) && tiles_allowed(); }

// Rows of x as the kernels read them: bfloat16 padded with zeros, each from a cache line on, and what some kinds of matrix need besides.
struct Rows {
    long m, stride;
    Kept<bf16> kept;
    bf16 *x;
    std::vector<bf16> squares;
    floats sums;
    Rows(const float *from, long m, long k, const Matrix &a) : m(m), stride((k + 255) / 256 * 256), x(kept.of(m * stride)) {
        for (long i = 0; i < m; i++) narrow(from + i * k, x + i * stride, k);
        look(a);
    }
    Rows(const bf16 *from, long m, long k, const Matrix &a) : m(m), stride((k + 255) / 256 * 256), x(kept.of(m * stride)) {
        for (long i = 0; i < m; i++) std::copy_n(from + i * k, k, x + i * stride);
        look(a);
    }
    // From sixteen rows as squares to the next.
    long far() const { return stride / 32 * SQUARE; }
    void look(const Matrix &a) {
        if (tiled(a, m) && a.kind != INT4) {
            squares.resize((m + 15) / 16 * far());
            for (long i = 0; i < m; i += 16) across(x + i * stride, stride, std::min(16l, m - i), a.columns, &squares[i / 16 * far()]);
        }
        if (a.kind == INT4) {
            long groups = (a.columns + a.group - 1) / a.group;
            sums.resize(m * groups);
            for (long i = 0; i < m; i++)
                for (long g = 0; g < groups; g++) {
                    __m512 sum = _mm512_setzero_ps();
                    for (long c = g * a.group; c < (g + 1) * a.group; c += 16) sum = _mm512_add_ps(sum, wide(x + i * stride + c));
                    sums[i * groups + g] = _mm512_reduce_add_ps(sum);
                }
        }
    }
};

// Columns c to c + 32 of a row as bfloat16, which holds bytes exactly.
__m512bh columns(const bf16 *w, long c, long k) {
    return pair(_mm512_maskz_loadu_epi16(k - c >= 32 ? ~0u : (1u << (k - c)) - 1, w + c));
}
__m512bh columns(const int8_t *w, long c, long k) {
    const __m256i bytes = _mm256_maskz_loadu_epi8(k - c >= 32 ? ~0u : (1u << (k - c)) - 1, w + c);
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
    return _mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1))), low);
}

// R rows of a matrix times M of x. The rows that come next are brought near meanwhile.
template <int R, int M, class Weight>
void rows_of(const Weight *w, long k, const bf16 *x, long xs, float *out, long os) {
    // filled up to whole fours
    __m512 sum[(M * R + 3) / 4 * 4];
    for (auto &one : sum) one = _mm512_setzero_ps();
    for (long c = 0; c < k; c += 32) {
        __m512bh rows[R];
        for (int r = 0; r < R; r++) {
            _mm_prefetch((const char *)(w + r * k + c) + AHEAD, _MM_HINT_T1);
            rows[r] = columns(w + r * k, c, k);
        }
        for (int i = 0; i < M; i++) {
            const __m512bh one = pair(_mm512_load_si512(x + i * xs + c));
            for (int r = 0; r < R; r++) sum[i * R + r] = _mm512_dpbf16_ps(sum[i * R + r], rows[r], one);
        }
    }
    alignas(16) float sums[(M * R + 3) / 4 * 4];
    for (int i = 0; i < M * R; i += 4) _mm_store_ps(sums + i, four_sums(sum[i], sum[i + 1], sum[i + 2], sum[i + 3]));
    for (int i = 0; i < M; i++) std::copy_n(sums + i * R, R, out + i * os);
}

// Rows `begin` to `end` of a matrix, times M of x.
template <int M, class Weight>
void in_rows(const Weight *w, long k, const bf16 *x, long xs, float *out, long os, long begin, long end) {
    constexpr int R = M > 4 ? 2 : 4;
    long r = begin;
    for (; r + R <= end; r += R) rows_of<R, M>(w + r * k, k, x, xs, out + r, os);
    for (; r < end; r++) rows_of<1, M>(w + r * k, k, x, xs, out + r, os);
}

// Pairs `j` of every block of a group's columns, for codes less 8, times M rows of x, added to sums.
template <int M>
void int4_pairs(const uint8_t *codes, long group, long j, const bf16 *x, long xs, const __m512i &table, __m512 (&sum)[M]) {
    const __m128i places = _mm_cvtsi32_si128(4 * j);
    for (long c = 0; c < group; c += BLOCK) {
        const __m512bh two = pair(_mm512_permutexvar_epi16(_mm512_srl_epi16(_mm512_loadu_si512(codes + 8 * c), places), table));
        for (int i = 0; i < M; i++) {
            int both;
            __builtin_memcpy(&both, x + i * xs + c + 2 * j, 4);
            sum[i] = _mm512_dpbf16_ps(sum[i], two, pair(_mm512_set1_epi32(both)));
        }
    }
}

// The sums of a group: of four, one for each of a block's pairs. Few rows of x have them side by side, so that none waits for the one
// before; more have them one after the other, as there are not so many registers.
template <int M>
void int4_group(const uint8_t *codes, long group, const bf16 *x, long xs, const __m512i &table, __m512 (&sum)[M]) {
    __m512 part[4][M];
    for (auto &row : part) std::fill_n(row, M, _mm512_setzero_ps());
    if constexpr (M > 4) {
        for (long c = 0; c < group; c += BLOCK) _mm_prefetch((const char *)codes + 8 * c + 2048, _MM_HINT_T0);
        int4_pairs(codes, group, 0, x, xs, table, part[0]);
        int4_pairs(codes, group, 1, x, xs, table, part[1]);
        for (int i = 0; i < M; i++) part[0][i] = _mm512_add_ps(part[0][i], part[1][i]);
        int4_pairs(codes, group, 2, x, xs, table, part[2]);
        int4_pairs(codes, group, 3, x, xs, table, part[3]);
        for (int i = 0; i < M; i++) sum[i] = _mm512_add_ps(part[0][i], _mm512_add_ps(part[2][i], part[3][i]));
    } else {
        for (long c = 0; c < group; c += BLOCK) {
            _mm_prefetch((const char *)codes + 8 * c + 2048, _MM_HINT_T0);
            for (int j = 0; j < 4; j++) int4_pairs(codes + 8 * c, BLOCK, j, x + c, xs, table, part[j]);
        }
        for (int i = 0; i < M; i++) sum[i] = _mm512_add_ps(_mm512_add_ps(part[0][i], part[1][i]), _mm512_add_ps(part[2][i], part[3][i]));
    }
}

template <int M>
void int4_tile(const uint8_t *codes, const bf16 *scales, long groups, long group, const bf16 *x, long xs, const float *sums, float *out) {
    const __m512i table = centred();
    __m512 whole[M], sum[M];
    std::fill_n(whole, M, _mm512_setzero_ps());
    for (long g = 0; g < groups; g++, scales += 2 * TILE, codes += 8 * group) {
        int4_group<M>(codes, group, x + g * group, xs, table, sum);
        const __m512i told = _mm512_loadu_si512(scales);
        const __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(told, 16));
        const __m512 zero = _mm512_castsi512_ps(_mm512_and_si512(told, _mm512_set1_epi32(0xffff0000)));
        for (int i = 0; i < M; i++) {
            whole[i] = _mm512_fmadd_ps(scale, sum[i], whole[i]);
            whole[i] = _mm512_fmadd_ps(zero, _mm512_set1_ps(sums[i * groups + g]), whole[i]);
        }
    }
    for (int i = 0; i < M; i++) _mm512_storeu_ps(out + i * TILE, whole[i]);
}

// Rows `begin` to `end` of M products; begin is a multiple of TILE.
template <int M>
void some(const Matrix &a, const Rows &x, long first, float *out, long os, long begin, long end) {
    const bf16 *rows = x.x + first * x.stride;
    const long k = a.columns;
    if (a.kind == WIDE) in_rows<M>((const bf16 *)a.weights, k, rows, x.stride, out, os, begin, end);
    if (a.kind == INT8) {
        in_rows<M>((const int8_t *)a.weights, k, rows, x.stride, out, os, begin, end);
        for (int i = 0; i < M; i++)
            for (long r = begin; r < end; r++) out[i * os + r] *= wide(a.scales[r]);
    }
    if (a.kind != INT4) return;
    const long groups = (k + a.group - 1) / a.group, size = groups * a.group * TILE / 2;
    for (long r = begin; r < end; r += TILE) {
        alignas(64) float tile[M * TILE];
        const long t = r / TILE;
        int4_tile<M>((const uint8_t *)a.weights + t * size, a.scales + t * groups * 2 * TILE, groups, a.group, rows, x.stride,
                     &x.sums[first * groups], tile);
        for (int i = 0; i < M; i++) std::copy_n(tile + i * TILE, std::min(TILE, end - r), out + i * os + r);
    }
}

void multiply_tiled(const Matrix &a, const Rows &x, float *out, long os, long begin, long end) {
    const auto put = [=](long row, long r, __mmask16 lanes, __m512 sums) { _mm512_mask_storeu_ps(out + row * os + r, lanes, sums); };
    if (a.kind != INT4) {
        tile_rows(a, {x.squares.data(), x.far()}, x.m, begin, end, put);
        return;
    }
    const long groups = (a.columns + a.group - 1) / a.group;
    for (long i = 0; i < x.m; i += 16) {
        const auto here = [=](long row, long r, __mmask16 lanes, __m512 sums) { put(i + row, r, lanes, sums); };
        int4_tile_rows(a, x.x + i * x.stride, x.stride, &x.sums[i * groups], std::min(16l, x.m - i), begin, end, here);
    }
}

void multiply_vectors(const Matrix &a, const Rows &x, float *out, long os, long begin, long end) {
    // So many rows stay near the core until all of x has met them.
    static constexpr decltype(&some<1>) BY_ROWS[] = {some<1>, some<2>, some<3>, some<4>, some<5>, some<6>, some<7>, some<8>};
    for (long r = begin; r < end; r += NEAR)
        for (long i = 0; i < x.m; i += 8) BY_ROWS[std::min(8l, x.m - i) - 1](a, x, i, out + i * os, os, r, std::min(end, r + NEAR));
}

// out[m, os] for rows begin to end of the matrix; begin is a multiple of TILE in INT4.
void multiply(const Matrix &a, const Rows &x, float *out, long os, long begin, long end) {
    (tiled(a, x.m) ? multiply_tiled : multiply_vectors)(a, x, out, os, begin, end);
    if (a.bias)
        for (long i = 0; i < x.m; i++)
            for (long r = begin; r < end; r++) out[i * os + r] += wide(a.bias[r]);
}

// This thread's share of n rows, in whole tiles.
struct Share {
    long begin, end;
    explicit Share(long n) {
        const long tiles = (n + TILE - 1) / TILE, who = omp_get_thread_num(), all = omp_get_num_threads();
        begin = std::min(n, tiles * who / all * TILE);
        end = std::min(n, tiles * (who + 1) / all * TILE);
    }
};

}  // namespace
