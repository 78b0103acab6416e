#include "narrow.h"

#include <string.h>

#include "kernels.h"
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define HAS_F16C 1
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

INLINE uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, sizeof u); return u; }
INLINE float float_of(uint32_t u) { float x; memcpy(&x, &u, sizeof x); return x; }

/* ---- bfloat16: the upper half of a float32 ------------------------------------------------ */

ADPSGD_VECTOR static void widen_bf16(float *restrict out, const uint16_t *restrict in, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = float_of((uint32_t)in[i] << 16);
}

/* Return the upper half of the bits of a float32, rounded to nearest, ties to even. */
INLINE uint32_t rounded_bf16(uint32_t u) {
  const uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  const uint32_t nan = (u >> 16) | 0x40u;
  return (u & 0x7FFFFFFFu) > 0x7F800000u ? nan : rounded;
}

ADPSGD_VECTOR static int narrow_bf16(uint16_t *restrict out, const float *restrict in, int64_t n) {
  uint32_t bad = 0;
  for (int64_t i = 0; i < n; i++) {
    const uint32_t x = rounded_bf16(bits_of(in[i]));
    bad |= (x & 0x7F80u) == 0x7F80u;
    out[i] = (uint16_t)x;
  }
  return bad != 0;
}

ADPSGD_VECTOR static void half_bf16(uint16_t *restrict out, const uint16_t *restrict x, const uint16_t *restrict y,
                                    int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const float a = float_of((uint32_t)x[i] << 16), b = float_of((uint32_t)y[i] << 16);
    out[i] = (uint16_t)rounded_bf16(bits_of(0.5f * a - 0.5f * b));
  }
}

/* ---- float16, by integer operations -------------------------------------------------------- */

/* Rebases the exponent of normal numbers by a multiplication, that of subnormal ones by a subtraction. */
ADPSGD_VECTOR static void widen_f16_plain(float *restrict out, const uint16_t *restrict in, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const uint32_t word = (uint32_t)in[i] << 16;
    const uint32_t twice = word + word;
    const float normal = float_of((twice >> 4) + (0xE0u << 23)) * 0x1.0p-112f;
    const float subnormal = float_of((twice >> 17) | (126u << 23)) - 0.5f;
    const uint32_t magnitude = twice < (1u << 27) ? bits_of(subnormal) : bits_of(normal);
    out[i] = float_of((word & 0x80000000u) | magnitude);
  }
}

/* Adds powers of two to let the floating-point unit round to 11 bits. */
ADPSGD_VECTOR static void narrow_f16_plain(uint16_t *restrict out, const float *restrict in, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const uint32_t word = bits_of(in[i]);
    const float magnitude = float_of(word & 0x7FFFFFFFu);
    float base = (magnitude * 0x1.0p+112f) * 0x1.0p-110f;
    const uint32_t twice = word + word;
    uint32_t bias = twice & 0xFF000000u;
    bias = bias < 0x71000000u ? 0x71000000u : bias;
    base = float_of((bias >> 1) + 0x07800000u) + base;
    const uint32_t bits = bits_of(base);
    const uint32_t number = ((bits >> 13) & 0x00007C00u) + (bits & 0x00000FFFu);
    const uint32_t finite = twice > 0xFF000000u ? 0x7E00u : number;
    out[i] = (uint16_t)((word >> 16 & 0x8000u) | finite);
  }
}

/* ---- float16, by the processor's own conversions (F16C), which compilers do not use for such loops ---- */

#ifdef HAS_F16C
__attribute__((target("avx512f"))) static int64_t widen_f16_wide(float *out, const uint16_t *in, int64_t n) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    _mm512_storeu_ps(out + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(in + i))));
  return i;
}

__attribute__((target("avx512f"))) static int64_t narrow_f16_wide(uint16_t *out, const float *in, int64_t n) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    _mm256_storeu_si256((__m256i *)(out + i), _mm512_cvtps_ph(_mm512_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
  return i;
}

__attribute__((target("avx,f16c"))) static int64_t widen_f16_half(float *out, const uint16_t *in, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(in + i))));
  return i;
}

__attribute__((target("avx,f16c"))) static int64_t narrow_f16_half(uint16_t *out, const float *in, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128((__m128i *)(out + i), _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
  return i;
}

__attribute__((target("avx512f"))) static int64_t half_f16_wide(uint16_t *out, const uint16_t *x, const uint16_t *y,
                                                                int64_t n) {
  const __m512 half = _mm512_set1_ps(0.5f);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m512 a = _mm512_mul_ps(half, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(x + i))));
    const __m512 b = _mm512_mul_ps(half, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(y + i))));
    _mm256_storeu_si256((__m256i *)(out + i), _mm512_cvtps_ph(_mm512_sub_ps(a, b), _MM_FROUND_TO_NEAREST_INT));
  }
  return i;
}

__attribute__((target("avx,f16c"))) static int64_t half_f16_half(uint16_t *out, const uint16_t *x, const uint16_t *y,
                                                                 int64_t n) {
  const __m256 half = _mm256_set1_ps(0.5f);
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 a = _mm256_mul_ps(half, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(x + i))));
    const __m256 b = _mm256_mul_ps(half, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(y + i))));
    _mm_storeu_si128((__m128i *)(out + i), _mm256_cvtps_ph(_mm256_sub_ps(a, b), _MM_FROUND_TO_NEAREST_INT));
  }
  return i;
}
#endif

static void widen_f16(float *out, const uint16_t *in, int64_t n) {
  int64_t done = 0;
#ifdef HAS_F16C
  if (__builtin_cpu_supports("avx512f")) done = widen_f16_wide(out, in, n);
  else if (__builtin_cpu_supports("f16c")) done = widen_f16_half(out, in, n);
#endif
  widen_f16_plain(out + done, in + done, n - done);
}

static void narrow_f16(uint16_t *out, const float *in, int64_t n) {
  int64_t done = 0;
#ifdef HAS_F16C
  if (__builtin_cpu_supports("avx512f")) done = narrow_f16_wide(out, in, n);
  else if (__builtin_cpu_supports("f16c")) done = narrow_f16_half(out, in, n);
#endif
  narrow_f16_plain(out + done, in + done, n - done);
}

static int64_t half_f16(uint16_t *out, const uint16_t *x, const uint16_t *y, int64_t n) {
#ifdef HAS_F16C
  if (__builtin_cpu_supports("avx512f")) return half_f16_wide(out, x, y, n);
  if (__builtin_cpu_supports("f16c")) return half_f16_half(out, x, y, n);
#endif
  (void)out, (void)x, (void)y, (void)n;
  return 0;
}

/* ---- both 16-bit types -------------------------------------------------------------------- */

ADPSGD_VECTOR static int any_with(uint16_t exponent, const uint16_t *restrict in, int64_t n) {
  uint16_t found = 0;
  for (int64_t i = 0; i < n; i++) found |= (in[i] & exponent) == exponent;
  return found != 0;
}

ADPSGD_VECTOR static int copy_with(uint16_t exponent, uint16_t *restrict out, const uint16_t *restrict in, int64_t n) {
  uint16_t found = 0;
  for (int64_t i = 0; i < n; i++) {
    out[i] = in[i];
    found |= (out[i] & exponent) == exponent;
  }
  return found != 0;
}

static uint16_t exponent_of(int dtype) { return dtype == ADPSGD_BFLOAT16 ? 0x7F80u : 0x7C00u; }

int adpsgd_infinite_16(int dtype, const void *in, int64_t n) { return any_with(exponent_of(dtype), in, n); }

int adpsgd_copy_16(int dtype, void *out, const void *in, int64_t n) { return copy_with(exponent_of(dtype), out, in, n); }

void adpsgd_widen(int dtype, float *out, const void *in, int64_t n) {
  if (dtype == ADPSGD_BFLOAT16) widen_bf16(out, in, n);
  else widen_f16(out, in, n);
}

int adpsgd_narrow(int dtype, void *out, const float *in, int64_t n) {
  if (dtype == ADPSGD_BFLOAT16) return narrow_bf16(out, in, n);
  narrow_f16(out, in, n);
  return adpsgd_infinite_16(dtype, out, n);
}

int64_t adpsgd_half_16(int dtype, void *out, const void *x, const void *y, int64_t n) {
  if (dtype == ADPSGD_FLOAT16) return half_f16(out, x, y, n);
  half_bf16(out, x, y, n);
  return n;
}
