#include "kernels.h"

#include <stddef.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

/* One clone per vector width, chosen at load time; plain code elsewhere. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__gnu_linux__)
#define VECTOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define VECTOR
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float f32;
typedef double f64;
typedef struct { uint16_t bits; } bf16;
typedef struct { uint16_t bits; } f16;

/* ---- element types ------------------------------------------------------------------ */

INLINE uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, sizeof u); return u; }
INLINE float float_of(uint32_t u) { float x; memcpy(&x, &u, sizeof x); return x; }

INLINE float load_f32(f32 x) { return x; }
INLINE double load_f64(f64 x) { return x; }
INLINE float load_bf16(bf16 x) { return float_of((uint32_t)x.bits << 16); }

/* Normal numbers are rebased by a multiplication, subnormal ones by a subtraction. */
INLINE float load_f16(f16 x) {
  const uint32_t word = (uint32_t)x.bits << 16;
  const uint32_t twice = word + word;
  const float normal = float_of((twice >> 4) + (0xE0u << 23)) * 0x1.0p-112f;
  const float subnormal = float_of((twice >> 17) | (126u << 23)) - 0.5f;
  const uint32_t magnitude = twice < (1u << 27) ? bits_of(subnormal) : bits_of(normal);
  return float_of((word & 0x80000000u) | magnitude);
}

INLINE f32 store_f32(float x) { return x; }
INLINE f64 store_f64(double x) { return x; }

/* Round to nearest, ties to even; NaN stays NaN. */
INLINE bf16 store_bf16(float x) {
  const uint32_t u = bits_of(x);
  const uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  const uint32_t nan = (u >> 16) | 0x40u;
  bf16 out = {(uint16_t)((u & 0x7FFFFFFFu) > 0x7F800000u ? nan : rounded)};
  return out;
}

/* The additions of 2^k constants let the FPU do the rounding to 11 bits. */
INLINE f16 store_f16(float x) {
  const uint32_t word = bits_of(x);
  const float magnitude = float_of(word & 0x7FFFFFFFu);
  float base = (magnitude * 0x1.0p+112f) * 0x1.0p-110f;
  const uint32_t twice = word + word;
  uint32_t bias = twice & 0xFF000000u;
  bias = bias < 0x71000000u ? 0x71000000u : bias;
  base = float_of((bias >> 1) + 0x07800000u) + base;
  const uint32_t bits = bits_of(base);
  const uint32_t number = ((bits >> 13) & 0x00007C00u) + (bits & 0x00000FFFu);
  const uint32_t finite = twice > 0xFF000000u ? 0x7E00u : number;
  f16 out = {(uint16_t)((word >> 16 & 0x8000u) | finite)};
  return out;
}

INLINE uint32_t infinite_f32(f32 x) { return (bits_of(x) & 0x7F800000u) == 0x7F800000u; }
INLINE uint32_t infinite_bf16(bf16 x) { return (x.bits & 0x7F80u) == 0x7F80u; }
INLINE uint32_t infinite_f16(f16 x) { return (x.bits & 0x7C00u) == 0x7C00u; }
INLINE uint64_t infinite_f64(f64 x) {
  uint64_t u;
  memcpy(&u, &x, sizeof u);
  return (u & 0x7FF0000000000000u) == 0x7FF0000000000000u;
}

#define FLAG_f32 uint32_t
#define FLAG_bf16 uint32_t
#define FLAG_f16 uint32_t
#define FLAG_f64 uint64_t
#define ACC_f32 float
#define ACC_bf16 float
#define ACC_f16 float
#define ACC_f64 double

/* ---- past the caches ------------------------------------------------------------------- */

#define BLOCK 1024

/* Copy a block that is in the first-level cache to memory that nobody reads soon. Writing past the
 * caches saves reading the destination first: one pass in three. */
static void stream_copy(void *to, const void *from, size_t nbytes) {
#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__) /* which does not see streamed stores */
  char *out = (char *)to;
  const char *in = (const char *)from;
  size_t head = (16 - ((uintptr_t)out & 15)) & 15;
  if (head > nbytes) head = nbytes;
  memcpy(out, in, head);
  out += head, in += head, nbytes -= head;
  for (; nbytes >= 64; nbytes -= 64, out += 64, in += 64) {
    const __m128i a = _mm_loadu_si128((const __m128i *)in);
    const __m128i b = _mm_loadu_si128((const __m128i *)(in + 16));
    const __m128i c = _mm_loadu_si128((const __m128i *)(in + 32));
    const __m128i d = _mm_loadu_si128((const __m128i *)(in + 48));
    _mm_stream_si128((__m128i *)out, a);
    _mm_stream_si128((__m128i *)(out + 16), b);
    _mm_stream_si128((__m128i *)(out + 32), c);
    _mm_stream_si128((__m128i *)(out + 48), d);
  }
  memcpy(out, in, nbytes);
#else
  memcpy(to, from, nbytes);
#endif
}

/* Streamed stores become visible before whatever is stored after this. */
static void stream_fence(void) {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

/* ---- the loops ------------------------------------------------------------------------ */

/* One block of a snapshot; `first` and `second` may be NULL. */
#define SNAPSHOT(T, W)                                                                        \
  VECTOR static uint32_t add_##T##_##W(W *restrict out, const T *restrict mirror,             \
                                       const ACC_##T *restrict first,                         \
                                       const ACC_##T *restrict second, int64_t n) {           \
    FLAG_##W bad = 0;                                                                         \
    if (!first && !second && AS_IT_IS_##T##_##W) {                                            \
      memcpy(out, mirror, (size_t)n * sizeof(W));                                             \
      for (int64_t i = 0; i < n; i++) bad |= infinite_##W(out[i]);                            \
    } else if (!first && !second) {                                                           \
      for (int64_t i = 0; i < n; i++) {                                                       \
        out[i] = store_##W(NARROW_##T##_##W(load_##T(mirror[i])));                            \
        bad |= infinite_##W(out[i]);                                                          \
      }                                                                                       \
    } else if (!second) {                                                                     \
      for (int64_t i = 0; i < n; i++) {                                                       \
        out[i] = store_##W(NARROW_##T##_##W(load_##T(mirror[i]) + first[i]));                 \
        bad |= infinite_##W(out[i]);                                                          \
      }                                                                                       \
    } else {                                                                                  \
      for (int64_t i = 0; i < n; i++) {                                                       \
        out[i] = store_##W(NARROW_##T##_##W(load_##T(mirror[i]) + first[i] + second[i]));     \
        bad |= infinite_##W(out[i]);                                                          \
      }                                                                                       \
    }                                                                                         \
    return bad != 0;                                                                          \
  }                                                                                           \
  static int snapshot_##T##_##W(W *out, const T *mirror, const ACC_##T *first,                \
                                const ACC_##T *second, W *keep, int64_t n, int stream) {      \
    uint32_t bad = 0;                                                                         \
    W block[BLOCK];                                                                           \
    for (int64_t start = 0; start < n; start += BLOCK) {                                      \
      const int64_t count = n - start < BLOCK ? n - start : BLOCK;                            \
      W *near = keep ? keep + start : stream ? block : out + start;                           \
      bad |= add_##T##_##W(near, mirror + start, first ? first + start : NULL,                \
                           second ? second + start : NULL, count);                            \
      if (stream) stream_copy(out + start, near, (size_t)count * sizeof(W));                  \
      if (keep && !stream) memcpy(out + start, near, (size_t)count * sizeof(W));              \
    }                                                                                         \
    return bad != 0;                                                                          \
  }

/* Whether a model without corrections goes out as it is stored. */
#define AS_IT_IS_f32_f32 1
#define AS_IT_IS_f32_bf16 0
#define AS_IT_IS_f32_f16 0
#define AS_IT_IS_f64_f64 1
#define AS_IT_IS_f64_bf16 0
#define AS_IT_IS_f64_f16 0
#define AS_IT_IS_bf16_bf16 1
#define AS_IT_IS_bf16_f32 0
#define AS_IT_IS_f16_f16 1
#define AS_IT_IS_f16_f32 0

/* A float64 sum goes to a 16-bit wire through float32. */
#define NARROW_f64_bf16 (float)
#define NARROW_f64_f16 (float)
#define NARROW_f32_f32
#define NARROW_f32_bf16
#define NARROW_f32_f16
#define NARROW_f64_f64
#define NARROW_bf16_bf16
#define NARROW_bf16_f32
#define NARROW_f16_f16
#define NARROW_f16_f32

/* The squared distance of a block whose square is not a finite float32. */
#define SQUARE(W)                                                                             \
  static double square_##W(const W *received, const W *sent, int64_t n) {                     \
    double square = 0;                                                                        \
    for (int64_t i = 0; i < n; i++) {                                                         \
      const double d = (double)load_##W(received[i]) - (double)load_##W(sent[i]);             \
      square += d * d;                                                                        \
    }                                                                                         \
    return square;                                                                            \
  }

/* Half of the difference, for the difference of two finite numbers may be infinite: doubling the weight
 * rounds nothing. Partial sums in blocks keep float32 accumulation accurate and vectorised. */
#define MERGE(A, W)                                                                           \
  VECTOR static double merge_##A##_##W(A *restrict correction, const W *restrict received,    \
                                       const W *restrict sent, double weight, int64_t n,      \
                                       int fresh, int stream) {                               \
    const A w = 2 * (A)weight, half = (A)0.5;                                                 \
    double total = 0;                                                                         \
    A block[BLOCK];                                                                           \
    for (int64_t start = 0; start < n; start += BLOCK) {                                      \
      const int64_t count = n - start < BLOCK ? n - start : BLOCK;                            \
      const W *restrict r = received + start;                                                 \
      const W *restrict s = sent + start;                                                     \
      A *restrict c = fresh && stream ? block : correction + start;                           \
      A square = 0;                                                                           \
      if (fresh) {                                                                            \
        _Pragma("omp simd reduction(+ : square)") for (int64_t i = 0; i < count; i++) {       \
          const A d = half * (A)load_##W(r[i]) - half * (A)load_##W(s[i]);                    \
          square += d * d;                                                                    \
          c[i] = w * d;                                                                       \
        }                                                                                     \
        if (stream) stream_copy(correction + start, block, (size_t)count * sizeof(A));        \
      } else {                                                                                \
        _Pragma("omp simd reduction(+ : square)") for (int64_t i = 0; i < count; i++) {       \
          const A d = half * (A)load_##W(r[i]) - half * (A)load_##W(s[i]);                    \
          square += d * d;                                                                    \
          c[i] = c[i] + w * d;                                                                \
        }                                                                                     \
      }                                                                                       \
      total += square <= (A)1e38 ? 4 * (double)square : square_##W(r, s, count);              \
    }                                                                                         \
    return total;                                                                             \
  }

/* One block of half the difference, in the type of sums and as on the wire. */
#define HALF(A, W)                                                                            \
  VECTOR static uint32_t half_##A##_##W(W *restrict half, const A *restrict theirs,           \
                                        const A *restrict mine, int64_t n) {                  \
    FLAG_##W bad = 0;                                                                         \
    for (int64_t i = 0; i < n; i++) {                                                         \
      half[i] = store_##W(NARROW_##A##_##W((A)0.5 * theirs[i] - (A)0.5 * mine[i]));           \
      bad |= infinite_##W(half[i]);                                                           \
    }                                                                                         \
    return bad != 0;                                                                          \
  }

/* As MERGE, of half the difference. A block whose square is not a finite float32 is summed in float64. */
#define MERGE_HALF(A, W)                                                                      \
  VECTOR static double merge_half_##A##_##W(A *restrict correction, const W *restrict half,   \
                                            double weight, int64_t n, int fresh,              \
                                            int stream) {                                     \
    const A w = 2 * (A)weight;                                                                \
    double total = 0;                                                                         \
    A block[BLOCK];                                                                           \
    for (int64_t start = 0; start < n; start += BLOCK) {                                      \
      const int64_t count = n - start < BLOCK ? n - start : BLOCK;                            \
      const W *restrict h = half + start;                                                     \
      A *restrict c = fresh && stream ? block : correction + start;                           \
      A square = 0;                                                                           \
      if (fresh) {                                                                            \
        _Pragma("omp simd reduction(+ : square)") for (int64_t i = 0; i < count; i++) {       \
          const A d = (A)load_##W(h[i]);                                                      \
          square += d * d;                                                                    \
          c[i] = w * d;                                                                       \
        }                                                                                     \
        if (stream) stream_copy(correction + start, block, (size_t)count * sizeof(A));        \
      } else {                                                                                \
        _Pragma("omp simd reduction(+ : square)") for (int64_t i = 0; i < count; i++) {       \
          const A d = (A)load_##W(h[i]);                                                      \
          square += d * d;                                                                    \
          c[i] = c[i] + w * d;                                                                \
        }                                                                                     \
      }                                                                                       \
      if (square <= (A)1e38) {                                                                \
        total += 4 * (double)square;                                                          \
      } else {                                                                                \
        for (int64_t i = 0; i < count; i++)                                                   \
          total += 4 * (double)load_##W(h[i]) * (double)load_##W(h[i]);                       \
      }                                                                                       \
    }                                                                                         \
    return total;                                                                             \
  }

#define CORRECT(T)                                                                            \
  VECTOR static FLAG_##T correct_##T(T *restrict parameter, const T *restrict correction,     \
                                     int64_t n) {                                             \
    FLAG_##T bad = 0;                                                                         \
    for (int64_t i = 0; i < n; i++) {                                                         \
      const T x = store_##T(load_##T(parameter[i]) + load_##T(correction[i]));                \
      parameter[i] = x;                                                                       \
      bad |= infinite_##T(x);                                                                 \
    }                                                                                         \
    return bad;                                                                               \
  }                                                                                           \
  VECTOR static FLAG_##T inspect_##T(const T *restrict parameter, int64_t n) {                \
    FLAG_##T bad = 0;                                                                         \
    for (int64_t i = 0; i < n; i++) bad |= infinite_##T(parameter[i]);                        \
    return bad;                                                                               \
  }

/* Block by block, so that the mirror is copied from the first-level cache. */
#define APPLY(T)                                                                              \
  CORRECT(T)                                                                                  \
  static int apply_##T(T *parameter, const T *correction, T *mirror, T *back, int64_t n,      \
                       int replace, int fresh, int stream) {                                  \
    FLAG_##T bad = 0;                                                                         \
    (void)back, (void)fresh;                                                                  \
    for (int64_t start = 0; start < n; start += BLOCK) {                                      \
      const int64_t count = n - start < BLOCK ? n - start : BLOCK;                            \
      T *p = parameter + start;                                                               \
      if (correction && replace) memcpy(p, correction + start, (size_t)count * sizeof(T));    \
      bad |= correction && !replace ? correct_##T(p, correction + start, count)               \
                                    : inspect_##T(p, count);                                  \
      if (mirror && stream) stream_copy(mirror + start, p, (size_t)count * sizeof(T));        \
      if (mirror && !stream) memcpy(mirror + start, p, (size_t)count * sizeof(T));            \
    }                                                                                         \
    return bad ? ADPSGD_NOT_FINITE : 0;                                                       \
  }

/* back = x, or back += x unless `fresh`. */
static void put_back(float *back, const float *x, int64_t n, int fresh, int stream) {
  if (!fresh) {
    for (int64_t i = 0; i < n; i++) back[i] += x[i];
  } else if (stream) {
    stream_copy(back, x, (size_t)n * sizeof(float));
  } else {
    memcpy(back, x, (size_t)n * sizeof(float));
  }
}

/* A 16-bit parameter takes the sum rounded, and what rounding holds back goes into `back` (NULL: nowhere),
 * the slot that is applied next: nothing is lost that is smaller than half a unit in the last place. */
#define APPLY_16(T)                                                                           \
  VECTOR static void sum_##T(float *restrict x, const T *restrict parameter,                  \
                             const float *restrict correction, int64_t n) {                   \
    for (int64_t i = 0; i < n; i++) x[i] = load_##T(parameter[i]) + correction[i];            \
  }                                                                                           \
  VECTOR static int round_##T(T *restrict parameter, float *restrict x, int64_t n) {          \
    uint32_t bad = 0, held = 0;                                                               \
    for (int64_t i = 0; i < n; i++) {                                                         \
      const T q = store_##T(x[i]);                                                            \
      const uint32_t finite = infinite_##T(q) - 1; /* as a mask: a branch is not vectorised */ \
      const uint32_t rest = bits_of(x[i] - load_##T(q)) & finite;                             \
      parameter[i] = q;                                                                       \
      x[i] = float_of(rest);                                                                  \
      bad |= ~finite;                                                                         \
      held |= rest << 1;                                                                      \
    }                                                                                         \
    return (bad ? ADPSGD_NOT_FINITE : 0) | (held ? ADPSGD_HELD_BACK : 0);                     \
  }                                                                                           \
  VECTOR static int inspect_##T(const T *restrict parameter, int64_t n) {                     \
    uint32_t bad = 0;                                                                         \
    for (int64_t i = 0; i < n; i++) bad |= infinite_##T(parameter[i]);                        \
    return bad ? ADPSGD_NOT_FINITE : 0;                                                       \
  }                                                                                           \
  static int apply_##T(T *parameter, const float *correction, T *mirror, float *back,         \
                       int64_t n, int replace, int fresh, int stream) {                       \
    int found = 0;                                                                            \
    float x[BLOCK];                                                                           \
    for (int64_t start = 0; start < n; start += BLOCK) {                                      \
      const int64_t count = n - start < BLOCK ? n - start : BLOCK;                            \
      T *p = parameter + start;                                                               \
      if (!correction) {                                                                      \
        found |= inspect_##T(p, count);                                                       \
      } else {                                                                                \
        if (replace) memcpy(x, correction + start, (size_t)count * sizeof(float));            \
        else sum_##T(x, p, correction + start, count);                                        \
        found |= round_##T(p, x, count);                                                      \
        if (back) put_back(back + start, x, count, fresh, stream);                            \
      }                                                                                       \
      if (mirror && stream) stream_copy(mirror + start, p, (size_t)count * sizeof(T));        \
      if (mirror && !stream) memcpy(mirror + start, p, (size_t)count * sizeof(T));            \
    }                                                                                         \
    return found;                                                                             \
  }

/* Two passes over a chunk that is in the caches: a sum that is not finite must change nothing. Numbers whose
 * squares or multiples are too large for the type of sums take double precision. */
#define MEAN(A)                                                                               \
  static double merge_large_##A(A *slot, const A *sum, const A *own, double k,                \
                                int64_t n, int fresh, int replace) {                          \
    double total = 0;                                                                         \
    for (int64_t i = 0; i < n; i++)                                                           \
      if (!(sum[i] - sum[i] == 0)) return -1.0;                                               \
    for (int64_t i = 0; i < n; i++) {                                                         \
      const double mean = (double)sum[i] / k, d = mean - (double)own[i];                      \
      total += d * d;                                                                         \
      slot[i] = (A)(replace ? mean : fresh ? d : (double)slot[i] + d);                        \
    }                                                                                         \
    return total;                                                                             \
  }                                                                                           \
  VECTOR static double merge_mean_##A(A *restrict slot, const A *restrict sum,                \
                                      const A *restrict own, double learners, int64_t n,      \
                                      int fresh, int replace) {                               \
    const A k = (A)learners;                                                                  \
    double total = 0;                                                                         \
    for (int64_t start = 0; start < n; start += BLOCK) {                                      \
      const int64_t end = n - start < BLOCK ? n : start + BLOCK;                              \
      A square = 0;                                                                           \
      _Pragma("omp simd reduction(+ : square)") for (int64_t i = start; i < end; i++) {       \
        const A d = (sum[i] - k * own[i]) / k;                                                \
        square += d * d;                                                                      \
      }                                                                                       \
      total += (double)square;                                                                \
    }                                                                                         \
    if (!(total <= 1.7e308)) return merge_large_##A(slot, sum, own, learners, n, fresh, replace); \
    if (replace) {                                                                            \
      for (int64_t i = 0; i < n; i++) slot[i] = sum[i] / k;                                   \
    } else if (fresh) {                                                                       \
      for (int64_t i = 0; i < n; i++) slot[i] = (sum[i] - k * own[i]) / k;                    \
    } else {                                                                                  \
      for (int64_t i = 0; i < n; i++)                                                         \
        slot[i] = slot[i] + (sum[i] - k * own[i]) / k;                                        \
    }                                                                                         \
    return total;                                                                             \
  }

SNAPSHOT(f32, f32) SNAPSHOT(f32, bf16) SNAPSHOT(f32, f16)
SNAPSHOT(f64, f64) SNAPSHOT(f64, bf16) SNAPSHOT(f64, f16)
SNAPSHOT(bf16, bf16) SNAPSHOT(bf16, f32)
SNAPSHOT(f16, f16) SNAPSHOT(f16, f32)
SQUARE(f32) SQUARE(f64) SQUARE(bf16) SQUARE(f16)
MERGE(f32, f32) MERGE(f32, bf16) MERGE(f32, f16)
MERGE(f64, f64) MERGE(f64, bf16) MERGE(f64, f16)
HALF(f32, f32) HALF(f32, bf16) HALF(f32, f16)
HALF(f64, f64) HALF(f64, bf16) HALF(f64, f16)
MERGE_HALF(f32, f32) MERGE_HALF(f32, bf16) MERGE_HALF(f32, f16)
MERGE_HALF(f64, f64) MERGE_HALF(f64, bf16) MERGE_HALF(f64, f16)
APPLY(f32) APPLY(f64)
APPLY_16(bf16) APPLY_16(f16)
MEAN(f32) MEAN(f64)

/* ---- dispatch ------------------------------------------------------------------------- */

#define PAIR(dtype, wire) ((dtype) * ADPSGD_DTYPES + (wire))

int adpsgd_itemsize(int dtype) {
  switch (dtype) {
    case ADPSGD_FLOAT32: return 4;
    case ADPSGD_FLOAT64: return 8;
    case ADPSGD_BFLOAT16:
    case ADPSGD_FLOAT16: return 2;
  }
  return 0;
}

int adpsgd_slot_dtype(int dtype) {
  return dtype == ADPSGD_FLOAT64 ? ADPSGD_FLOAT64 : ADPSGD_FLOAT32;
}

int adpsgd_slot_itemsize(int dtype) { return adpsgd_itemsize(adpsgd_slot_dtype(dtype)); }

#define EACH_SLOT_PAIR(CASE)                                                                  \
  CASE(ADPSGD_FLOAT32, ADPSGD_FLOAT32, f32, f32)                                              \
  CASE(ADPSGD_FLOAT32, ADPSGD_BFLOAT16, f32, bf16)                                            \
  CASE(ADPSGD_FLOAT32, ADPSGD_FLOAT16, f32, f16)                                              \
  CASE(ADPSGD_FLOAT64, ADPSGD_FLOAT64, f64, f64)                                              \
  CASE(ADPSGD_FLOAT64, ADPSGD_BFLOAT16, f64, bf16)                                            \
  CASE(ADPSGD_FLOAT64, ADPSGD_FLOAT16, f64, f16)

#define EACH_PAIR(CASE)                                                                       \
  EACH_SLOT_PAIR(CASE)                                                                        \
  CASE(ADPSGD_BFLOAT16, ADPSGD_BFLOAT16, bf16, bf16)                                          \
  CASE(ADPSGD_BFLOAT16, ADPSGD_FLOAT32, bf16, f32)                                            \
  CASE(ADPSGD_FLOAT16, ADPSGD_FLOAT16, f16, f16)                                              \
  CASE(ADPSGD_FLOAT16, ADPSGD_FLOAT32, f16, f32)

int adpsgd_snapshot(int dtype, int wire, void *out, const void *mirror, const void *first,
                    const void *second, void *keep, int64_t n, int stream) {
  int bad = 1;
  if (!first) {
    first = second;
    second = NULL;
  }
  switch (PAIR(dtype, wire)) {
#define CASE(D, V, T, W)                                                                      \
  case PAIR(D, V):                                                                            \
    bad = snapshot_##T##_##W((W *)out, (const T *)mirror, (const ACC_##T *)first,             \
                             (const ACC_##T *)second, (W *)keep, n, stream);                  \
    break;
    EACH_PAIR(CASE)
#undef CASE
  }
  if (stream) stream_fence();
  return bad;
}

double adpsgd_merge(int dtype, int wire, void *correction, const void *received, const void *sent,
                    double weight, int64_t n, int fresh, int stream) {
  double square = -1.0;
  switch (PAIR(adpsgd_slot_dtype(dtype), wire)) {
#define CASE(D, V, A, W)                                                                      \
  case PAIR(D, V):                                                                            \
    square = merge_##A##_##W((A *)correction, (const W *)received, (const W *)sent, weight,   \
                             n, fresh, stream);                                               \
    break;
    EACH_SLOT_PAIR(CASE)
#undef CASE
  }
  if (stream) stream_fence();
  return square;
}

/* One block of a model in the type of sums: a copy of it, unless it is stored so. */
static const void *block_of(const adpsgd_model *model, int sums, void *copy, int64_t start, int64_t n) {
  const int64_t size = adpsgd_itemsize(sums);
  const char *base = (const char *)model->base + start * adpsgd_itemsize(model->dtype);
  const char *first = model->first, *second = model->second;
  if (model->dtype == sums && !first && !second) return base;
  adpsgd_snapshot(model->dtype, sums, copy, base, first ? first + start * size : NULL,
                  second ? second + start * size : NULL, NULL, n, 0);
  return copy;
}

int adpsgd_half_difference(int sums, int wire, void *half, const adpsgd_model *mine,
                           const adpsgd_model *theirs, void *keep, int64_t n, int stream) {
  const int64_t size = adpsgd_itemsize(wire);
  double ours[BLOCK], others[BLOCK], block[BLOCK];
  uint32_t bad = 0;
  for (int64_t start = 0; start < n; start += BLOCK) {
    const int64_t count = n - start < BLOCK ? n - start : BLOCK;
    const void *a = block_of(mine, sums, ours, start, count);
    const void *b = block_of(theirs, sums, others, start, count);
    char *out = (char *)half + start * size;
    void *near = keep ? (char *)keep + start * size : stream ? (void *)block : out;
    switch (PAIR(sums, wire)) {
#define CASE(D, V, A, W)                                                                      \
  case PAIR(D, V):                                                                            \
    bad |= half_##A##_##W((W *)near, (const A *)b, (const A *)a, count);                      \
    break;
      EACH_SLOT_PAIR(CASE)
#undef CASE
    }
    if (stream) stream_copy(out, near, (size_t)(count * size));
    if (keep && !stream) memcpy(out, near, (size_t)(count * size));
  }
  if (stream) stream_fence();
  return bad != 0;
}

double adpsgd_merge_half(int dtype, int wire, void *correction, const void *half, double weight,
                         int64_t n, int fresh, int stream) {
  double square = -1.0;
  switch (PAIR(adpsgd_slot_dtype(dtype), wire)) {
#define CASE(D, V, A, W)                                                                      \
  case PAIR(D, V):                                                                            \
    square = merge_half_##A##_##W((A *)correction, (const W *)half, weight, n, fresh, stream); \
    break;
    EACH_SLOT_PAIR(CASE)
#undef CASE
  }
  if (stream) stream_fence();
  return square;
}

#define EACH_TYPE(CASE)                                                                       \
  CASE(ADPSGD_FLOAT32, f32)                                                                   \
  CASE(ADPSGD_FLOAT64, f64)                                                                   \
  CASE(ADPSGD_BFLOAT16, bf16)                                                                 \
  CASE(ADPSGD_FLOAT16, f16)

int adpsgd_apply(int dtype, void *parameter, const void *correction, void *mirror, void *back,
                 int64_t n, int replace, int fresh, int stream) {
  int found = ADPSGD_NOT_FINITE;
  switch (dtype) {
#define CASE(D, T)                                                                            \
  case D:                                                                                     \
    found = apply_##T(parameter, correction, mirror, back, n, replace, fresh, stream);        \
    break;
    EACH_TYPE(CASE)
#undef CASE
  }
  if (stream) stream_fence();
  return found;
}

double adpsgd_merge_mean(int dtype, void *slot, const void *sum, const void *own, double learners,
                         int64_t n, int fresh, int replace) {
  if (dtype == ADPSGD_FLOAT64) return merge_mean_f64(slot, sum, own, learners, n, fresh, replace);
  return merge_mean_f32(slot, sum, own, learners, n, fresh, replace);
}

/* Such a number has one of the two largest exponents; infinity and NaN have the largest. */
VECTOR static int any_large_f32(const f32 *restrict x, int64_t n) {
  uint32_t found = 0;
  for (int64_t i = 0; i < n; i++) found |= (bits_of(x[i]) & 0x7F000000u) == 0x7F000000u;
  return found != 0;
}

VECTOR static int any_large_f64(const f64 *restrict x, int64_t n) {
  uint64_t found = 0, u;
  for (int64_t i = 0; i < n; i++) {
    memcpy(&u, &x[i], sizeof u);
    found |= (u & 0x7FE0000000000000u) == 0x7FE0000000000000u;
  }
  return found != 0;
}

int adpsgd_any_large(int dtype, const void *numbers, int64_t n) {
  return dtype == ADPSGD_FLOAT64 ? any_large_f64(numbers, n) : any_large_f32(numbers, n);
}
