// Single products, and int4 matrices written out, for what is no whole layer.

#include <omp.h>

#include "products.h"

extern "C" {

// out[m, n] = x[m, k] a^T + bias, float32.
void product(const Matrix *a, const bf16 *x, float *out, long m) {
#pragma omp parallel
    {
        const Rows rows(x, m, a->columns, *a);
        const Share mine(a->rows);
        multiply(*a, rows, out, a->rows, mine.begin, mine.end);
    }
}

// out[n, k], the numbers that an INT4 matrix stands for, rounded to bfloat16 once.
void written_out(const Matrix *a, bf16 *out) {
    const long k = a->columns, groups = (k + a->group - 1) / a->group, blocks = groups * a->group / BLOCK;
#pragma omp parallel
    {
        const Share mine(a->rows);
        const __m512i table = centred(), upper = _mm512_set1_epi32(0xffff0000);
        const __m512i lanes = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_epi32(k));
        for (long r = mine.begin; r < mine.end; r += TILE) {
            const __mmask16 rows = live(mine.end - r);
            const uint8_t *codes = (const uint8_t *)a->weights + r / TILE * blocks * 64;
            for (long b = 0; b < blocks; b++, codes += 64) {
                const __m512i told = _mm512_loadu_si512(a->scales + (r / TILE * groups + b * BLOCK / a->group) * 2 * TILE);
                const __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(told, 16)), zero = _mm512_castsi512_ps(_mm512_and_si512(told, upper));
                const __m512i four = _mm512_loadu_si512(codes);
                for (int j = 0; j < 4; j++) {
                    const long c = b * BLOCK + 2 * j;
                    if (c >= k) break;
                    const __m512i two = _mm512_permutexvar_epi16(_mm512_srli_epi16(four, 4 * j), table);
                    const __m512 even = _mm512_fmadd_ps(scale, _mm512_castsi512_ps(_mm512_slli_epi32(two, 16)), zero);
                    const __m512 odd = _mm512_fmadd_ps(scale, _mm512_castsi512_ps(_mm512_and_si512(two, upper)), zero);
                    const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(even));
                    const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(odd)), 16);
                    // Columns are even in number, as a kernel's user sees to.
                    _mm512_mask_i32scatter_epi32(out + r * k + c, rows, lanes, _mm512_or_si512(low, high), 2);
                }
            }
        }
    }
}

}
