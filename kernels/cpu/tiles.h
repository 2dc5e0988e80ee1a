// Tiles (AMX, Intel since Sapphire Rapids): eight registers a thread, of sixteen rows of 64 bytes each.
//
// tiles_allowed() says whether this process may use them. While a `Tiles` lives, its thread's are ours:
//   TILE_ZERO(0); TILE_LOAD(4, a, bytes from row to row); TILE_LOAD(6, b, 64); TILE_ADD(0, 4, 6); TILE_STORE(0, c, 64);
// adds to c[i][j] the sum over 32 columns of a[i][column] b[column / 2][j][column % 2], a and b bfloat16, c float32: `across` makes such
// a b of rows. What a store has written a load finds late: fill several tiles before the first of them is loaded.

#pragma once

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>

// Assemblers beside older compilers have no words for tiles; nothing is allowed then, and nothing of it is reached.
#if __GNUC__ >= 11
#define TILE_WORD(...) asm volatile(__VA_ARGS__)
#else
#define TILE_WORD(...) __builtin_trap()
#endif
// The compiler knows nothing of these registers, and is told of the memory.
#define TILE_ZERO(c) TILE_WORD("tilezero %%tmm" #c :::)
#define TILE_LOAD(t, from, stride) TILE_WORD("tileloadd (%0,%1,1), %%tmm" #t ::"r"(from), "r"((long)(stride)) : "memory")
#define TILE_STORE(t, to, stride) TILE_WORD("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(to), "r"((long)(stride)) : "memory")
#define TILE_ADD(c, a, b) TILE_WORD("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c :::)

namespace {

// Asks the kernel once; it lends the memory that a thread's tiles take at a switch to whole processes, and may refuse.
bool tiles_allowed() {
    static const bool allowed = [] {
        unsigned a, b, c, d;
        const unsigned units = 1u << 22 | 1u << 24, tile_data = 18, request = 0x1023;
        const bool has = __GNUC__ >= 11 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & units) == units;
        return has && syscall(SYS_arch_prctl, request, tile_data) == 0;
    }();
    return allowed;
}

// How many rows, of how many bytes, each register has.
struct alignas(64) TileShape {
    uint8_t palette = 1, start = 0, none[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

// Registers 0 to 5, sums and left operands, of so many rows; 6 and 7, right operands, of sixteen. Others in this process (torch's
// products) set them once and believe that they stay so: the shape that was there before comes back at the end. Nothing happens where they
// are not allowed.
class Tiles {
    TileShape before;

  public:
    explicit Tiles(long rows) {
        if (!tiles_allowed()) return;
        TileShape ours;
        std::fill_n(ours.bytes, 8, 64);
        std::fill_n(ours.rows, 6, (uint8_t)rows);
        std::fill_n(ours.rows + 6, 2, 16);
        TILE_WORD("sttilecfg %0" : "=m"(before));
        TILE_WORD("ldtilecfg %0" ::"m"(ours));
    }
    Tiles(const Tiles &) = delete;
    ~Tiles() {
        if (tiles_allowed()) TILE_WORD("ldtilecfg %0" ::"m"(before));
    }
};

// Sixteen by sixteen of 32 bits, rows for columns; always where it is asked for, so that the rows stay in registers.
__attribute__((always_inline)) inline void transpose(__m512i (&r)[16]) {
    __m512i s[16];
    for (int i = 0; i < 16; i += 2) s[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]), s[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm512_unpacklo_epi64(s[i + j], s[i + j + 2]);
            r[i + 2 * j + 1] = _mm512_unpackhi_epi64(s[i + j], s[i + j + 2]);
        }
    for (int i = 0; i < 4; i++) {
        s[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88), s[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        s[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88), s[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_i32x4(s[i], s[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(s[i], s[i + 8], 0xdd);
    }
}

// At most sixteen rows of k columns as right operands, a kilobyte for every 32 columns: [k / 32, 16 pairs of columns, 16 rows, 2], zeros
// where there is no row or column. What lies `ahead` of them is brought near meanwhile.
void across(const uint16_t *x, long stride, long rows, long k, uint16_t *to, long ahead = 0) {
    for (long c = 0; c < k; c += 32, to += 512) {
        const __mmask32 columns = k - c >= 32 ? ~0u : (1u << (k - c)) - 1;
        __m512i r[16];
        for (long i = 0; i < 16; i++) r[i] = i < rows ? _mm512_maskz_loadu_epi16(columns, x + i * stride + c) : _mm512_setzero_si512();
        transpose(r);
        for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + 32 * i, r[i]);
        for (long i = 0; ahead && i < 16; i++) _mm_prefetch((const char *)(x + ahead + i * stride + c), _MM_HINT_T1);
    }
}

}  // namespace
