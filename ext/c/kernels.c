#include "kernels.h"

#include <stddef.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "narrow.h"

/* Every loop computes in the type of sums (float64 for float64, float32 for all others), block by block.
 * 16-bit numbers are widened before the computation and narrowed after it, in the first-level cache.
 *
 * A block is 1 KiB in the type of sums. While a block is computed, the next one is prefetched, and a core
 * can wait for few cache lines at once: with blocks of 4 KiB the prefetches exceed that number and the
 * speed halves. */
#define BLOCK_NBYTES 1024
#define LINE_NBYTES 64
#define BLOCK (BLOCK_NBYTES / (int)sizeof(f32))

#define INLINE static inline __attribute__((always_inline))

typedef float f32;
typedef double f64;

/* A block of numbers in the type of sums. It begins at a cache line, so that no stored vector crosses two
 * lines: a load of such a vector would have to wait until all earlier stores have left the core, also
 * those past the caches. */
typedef union {
  _Alignas(LINE_NBYTES) f32 f32[BLOCK_NBYTES / sizeof(f32)];
  f64 f64[BLOCK_NBYTES / sizeof(f64)];
} Block;

INLINE uint32_t infinite_f32(f32 x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  return (u & 0x7F800000u) == 0x7F800000u;
}
INLINE uint64_t infinite_f64(f64 x) {
  uint64_t u;
  memcpy(&u, &x, sizeof u);
  return (u & 0x7FF0000000000000u) == 0x7FF0000000000000u;
}

#define FLAG_f32 uint32_t
#define FLAG_f64 uint64_t

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

/* Return how many numbers a block holds. */
static int64_t block_of(int sums) { return BLOCK_NBYTES / adpsgd_itemsize(sums); }

/* ---- past the caches ------------------------------------------------------------------- */

/* Copy a block that is in the first-level cache to memory that nobody reads soon. Writing past the
 * caches saves reading the destination first: one pass in three. */
static void stream_copy(void *to, const void *from, size_t nbytes) {
#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__) /* ThreadSanitizer does not see streamed stores */
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

/* Prefetch a block of an array; past the end of the array this is harmless. */
static void ahead(const void *x, int64_t nbytes) {
#if defined(__SSE2__)
  for (int64_t i = 0; x && i < nbytes; i += 64) _mm_prefetch((const char *)x + i, _MM_HINT_T0);
#else
  (void)x, (void)nbytes;
#endif
}

static void copy_block(void *to, const void *from, int64_t nbytes, int stream) {
  if (stream) stream_copy(to, from, (size_t)nbytes);
  else memcpy(to, from, (size_t)nbytes);
}

/* Make streamed stores visible before all later stores. */
static void fence(int stream) {
#if defined(__SSE2__)
  if (stream) _mm_sfence();
#else
  (void)stream;
#endif
}

/* ---- blocks in the type of sums ----------------------------------------------------------- */

#define BLOCKS(A)                                                                             \
  /* Return whether any number is infinite or not a number. */                                \
  ADPSGD_VECTOR static int inspect_##A(const A *restrict x, int64_t n) {                      \
    FLAG_##A bad = 0;                                                                         \
    for (int64_t i = 0; i < n; i++) bad |= infinite_##A(x[i]);                                \
    return bad != 0;                                                                          \
  }                                                                                           \
  /* out = x, each read once. Returns as inspect does. */                                     \
  ADPSGD_VECTOR static int copy_##A(A *restrict out, const A *restrict x, int64_t n) {        \
    FLAG_##A bad = 0;                                                                         \
    for (int64_t i = 0; i < n; i++) {                                                         \
      out[i] = x[i];                                                                          \
      bad |= infinite_##A(out[i]);                                                            \
    }                                                                                         \
    return bad != 0;                                                                          \
  }                                                                                           \
  /* out = base + first + second, left to right; second may be NULL. Returns as inspect. */   \
  ADPSGD_VECTOR static int add_##A(A *restrict out, const A *restrict base,                   \
                                   const A *restrict first, const A *restrict second,         \
                                   int64_t n) {                                               \
    FLAG_##A bad = 0;                                                                         \
    if (!second) {                                                                            \
      for (int64_t i = 0; i < n; i++) {                                                       \
        out[i] = base[i] + first[i];                                                          \
        bad |= infinite_##A(out[i]);                                                          \
      }                                                                                       \
    } else {                                                                                  \
      for (int64_t i = 0; i < n; i++) {                                                       \
        out[i] = base[i] + first[i] + second[i];                                              \
        bad |= infinite_##A(out[i]);                                                          \
      }                                                                                       \
    }                                                                                         \
    return bad != 0;                                                                          \
  }                                                                                           \
  /* x += y. Returns as inspect does. */                                                      \
  ADPSGD_VECTOR static int increase_##A(A *restrict x, const A *restrict y, int64_t n) {      \
    FLAG_##A bad = 0;                                                                         \
    for (int64_t i = 0; i < n; i++) {                                                         \
      x[i] += y[i];                                                                           \
      bad |= infinite_##A(x[i]);                                                              \
    }                                                                                         \
    return bad != 0;                                                                          \
  }                                                                                           \
  /* out = (x - y) / 2, which is finite if x and y are. Returns as inspect does. */           \
  ADPSGD_VECTOR static int half_##A(A *restrict out, const A *restrict x,                     \
                                    const A *restrict y, int64_t n) {                         \
    const A half = (A)0.5;                                                                    \
    FLAG_##A bad = 0;                                                                         \
    for (int64_t i = 0; i < n; i++) {                                                         \
      out[i] = half * x[i] - half * y[i];                                                     \
      bad |= infinite_##A(out[i]);                                                            \
    }                                                                                         \
    return bad != 0;                                                                          \
  }                                                                                           \
  /* c (+)= w (x - y) / 2. Returns the sum of the squares of (x - y) / 2, which may overflow. */ \
  ADPSGD_VECTOR static double differ_##A(A *restrict c, const A *restrict x,                  \
                                         const A *restrict y, A w, int64_t n, int fresh) {    \
    const A half = (A)0.5;                                                                    \
    A square = 0;                                                                             \
    if (fresh) {                                                                              \
      _Pragma("omp simd reduction(+ : square)") for (int64_t i = 0; i < n; i++) {             \
        const A d = half * x[i] - half * y[i];                                                \
        square += d * d;                                                                      \
        c[i] = w * d;                                                                         \
      }                                                                                       \
    } else {                                                                                  \
      _Pragma("omp simd reduction(+ : square)") for (int64_t i = 0; i < n; i++) {             \
        const A d = half * x[i] - half * y[i];                                                \
        square += d * d;                                                                      \
        c[i] = c[i] + w * d;                                                                  \
      }                                                                                       \
    }                                                                                         \
    return (double)square;                                                                    \
  }                                                                                           \
  /* c (+)= w h. Returns the sum of the squares of h, which may overflow. */                  \
  ADPSGD_VECTOR static double weigh_##A(A *restrict c, const A *restrict h, A w, int64_t n,   \
                                        int fresh) {                                          \
    A square = 0;                                                                             \
    if (fresh) {                                                                              \
      _Pragma("omp simd reduction(+ : square)") for (int64_t i = 0; i < n; i++) {             \
        square += h[i] * h[i];                                                                \
        c[i] = w * h[i];                                                                      \
      }                                                                                       \
    } else {                                                                                  \
      _Pragma("omp simd reduction(+ : square)") for (int64_t i = 0; i < n; i++) {             \
        square += h[i] * h[i];                                                                \
        c[i] = c[i] + w * h[i];                                                               \
      }                                                                                       \
    }                                                                                         \
    return (double)square;                                                                    \
  }                                                                                           \
  /* The sum of the squares of x - y; `y` may be NULL. */                                     \
  static double square_##A(const A *x, const A *y, int64_t n) {                               \
    double square = 0;                                                                        \
    for (int64_t i = 0; i < n; i++) {                                                         \
      const double d = (double)x[i] - (y ? (double)y[i] : 0);                                 \
      square += d * d;                                                                        \
    }                                                                                         \
    return square;                                                                            \
  }

BLOCKS(f32)
BLOCKS(f64)

/* Call the variant of f for a type of sums. */
#define SUMS(type, f, ...) ((type) == ADPSGD_FLOAT64 ? f##_f64(__VA_ARGS__) : f##_f32(__VA_ARGS__))

/* Return a block of type `dtype` in the type of sums: x itself if that is its type, else widened into
 * `copy`. */
static const void *widened(int sums, int dtype, void *copy, const void *x, int64_t n) {
  _Alignas(LINE_NBYTES) float narrow[BLOCK];
  if (dtype == sums) return x;
  if (sums == ADPSGD_FLOAT32) {
    adpsgd_widen(dtype, copy, x, n);
  } else {
    adpsgd_widen(dtype, narrow, x, n);
    for (int64_t i = 0; i < n; i++) ((f64 *)copy)[i] = narrow[i];
  }
  return copy;
}

/* Store a block of the type of sums as 16-bit `wire`, float64 through float32. Returns as inspect does. */
static int narrowed(int sums, int wire, void *out, const void *x, int64_t n) {
  _Alignas(LINE_NBYTES) float single[BLOCK];
  if (sums == ADPSGD_FLOAT64) {
    for (int64_t i = 0; i < n; i++) single[i] = (float)((const f64 *)x)[i];
    x = single;
  }
  return adpsgd_narrow(wire, out, x, n);
}

static int inspect(int dtype, const void *x, int64_t n) {
  return adpsgd_itemsize(dtype) == 2 ? adpsgd_infinite_16(dtype, x, n) : SUMS(dtype, inspect, x, n);
}

static const void *after(const void *x, int64_t start, int itemsize) {
  return x ? (const char *)x + start * itemsize : NULL;
}

/* ---- the loops ------------------------------------------------------------------------------ */

/* Compute one block of a snapshot. Returns as inspect does. */
static int snapshot_block(int dtype, int wire, void *out, const void *base, const void *first,
                          const void *second, int64_t n) {
  const int sums = adpsgd_slot_dtype(dtype);
  Block wide, sum;
  const void *x;
  if (dtype == wire && !first)
    return dtype == sums ? SUMS(sums, copy, out, base, n) : adpsgd_copy_16(dtype, out, base, n);
  if (wire == sums && !first) return inspect(wire, widened(sums, dtype, out, base, n), n);
  x = widened(sums, dtype, &wide, base, n);
  if (wire == sums) return SUMS(sums, add, out, x, first, second, n);
  if (first) {
    (void)SUMS(sums, add, (void *)&sum, x, first, second, n);
    x = &sum;
  }
  return narrowed(sums, wire, out, x, n);
}

int adpsgd_snapshot(int dtype, int wire, void *out, const void *mirror, const void *first,
                    const void *second, int64_t n) {
  const int64_t whole = block_of(adpsgd_slot_dtype(dtype));
  const int from = adpsgd_itemsize(dtype), to = adpsgd_itemsize(wire), wide = adpsgd_slot_itemsize(dtype);
  int bad = 0;
  if (!first) {
    first = second;
    second = NULL;
  }
  for (int64_t start = 0; start < n; start += whole) {
    const int64_t count = n - start < whole ? n - start : whole;
    bad |= snapshot_block(dtype, wire, (char *)out + start * to, after(mirror, start, from),
                          after(first, start, wide), after(second, start, wide), count);
  }
  return bad;
}

/* Computes half of the difference, because the difference of two finite numbers may be infinite; doubling
 * the weight makes no rounding error. Partial sums over blocks keep float32 accumulation accurate and
 * vectorised. */
double adpsgd_merge(int dtype, int wire, void *correction, const void *received, const void *sent,
                    double weight, int64_t n, int fresh, int stream) {
  const int sums = adpsgd_slot_dtype(dtype), from = adpsgd_itemsize(wire), to = adpsgd_itemsize(sums);
  const int64_t whole = block_of(sums);
  Block block, first, second;
  double total = 0;
  for (int64_t start = 0; start < n; start += whole) {
    const int64_t count = n - start < whole ? n - start : whole;
    if (stream) {
      ahead(after(received, start + whole, from), whole * from);
      ahead(after(sent, start + whole, from), whole * from);
    }
    const void *r = widened(sums, wire, &first, after(received, start, from), count);
    const void *s = widened(sums, wire, &second, after(sent, start, from), count);
    char *place = (char *)correction + start * to;
    void *near = fresh && stream ? (void *)&block : place;
    const double square = SUMS(sums, differ, near, r, s, 2 * weight, count, fresh);
    if (near != (void *)place) stream_copy(place, near, (size_t)(count * to));
    total += square <= 1e38 ? 4 * square : SUMS(sums, square, r, s, count);
  }
  fence(stream);
  return total;
}

/* Return one block of a model in the type of sums: in place, or computed into `copy`. */
static const void *model_block(const adpsgd_model *model, int sums, Block *copy, int64_t start, int64_t n) {
  const int wide = adpsgd_itemsize(sums), size = adpsgd_itemsize(model->dtype);
  const void *base = after(model->base, start, size);
  const void *first = after(model->first ? model->first : model->second, start, wide);
  if (!first) return widened(sums, model->dtype, copy, base, n);
  snapshot_block(model->dtype, sums, copy, base, first,
                 model->first ? after(model->second, start, wide) : NULL, n);
  return copy;
}

/* Compute one block of (theirs - mine) / 2. Returns as inspect does. */
static int half_block(int sums, int wire, void *half, const adpsgd_model *mine, const adpsgd_model *theirs, int64_t start,
                      int64_t n) {
  Block ours, others, difference;
  const void *x = model_block(theirs, sums, &others, start, n), *y = model_block(mine, sums, &ours, start, n);
  if (wire == sums) return SUMS(sums, half, half, x, y, n);
  (void)SUMS(sums, half, (void *)&difference, x, y, n);
  return narrowed(sums, wire, half, &difference, n);
}

static int is_stored_as(const adpsgd_model *model, int dtype) {
  return model->dtype == dtype && !model->first && !model->second;
}

int adpsgd_half_difference(int sums, int wire, void *half, const adpsgd_model *mine,
                           const adpsgd_model *theirs, void *keep, int64_t n, int stream) {
  const int64_t whole = block_of(sums);
  const int to = adpsgd_itemsize(wire), own = adpsgd_itemsize(mine->dtype), other = adpsgd_itemsize(theirs->dtype);
  const int direct = to == 2 && is_stored_as(mine, wire) && is_stored_as(theirs, wire);
  Block block;
  int bad = 0;
  for (int64_t start = 0; start < n; start += whole) {
    const int64_t count = n - start < whole ? n - start : whole;
    const void *x = after(theirs->base, start, other), *y = after(mine->base, start, own);
    char *place = (char *)half + start * to;
    void *near = keep ? (char *)keep + start * to : stream ? (void *)&block : place;
    int64_t done = 0;
    if (stream) {
      ahead(after(y, whole, own), whole * own);
      ahead(after(x, whole, other), whole * other);
    }
    if (direct) {
      done = adpsgd_half_16(wire, near, x, y, count);
      bad |= adpsgd_infinite_16(wire, near, done);
    }
    if (done < count) bad |= half_block(sums, wire, (char *)near + done * to, mine, theirs, start + done, count - done);
    if (near != (void *)place) copy_block(place, near, count * to, stream);
  }
  fence(stream);
  return bad;
}

/* Computes as adpsgd_merge does, from half of the difference. */
double adpsgd_merge_half(int dtype, int wire, void *correction, const void *half, double weight,
                         int64_t n, int fresh, int stream) {
  const int sums = adpsgd_slot_dtype(dtype), from = adpsgd_itemsize(wire), to = adpsgd_itemsize(sums);
  const int64_t whole = block_of(sums);
  Block block, wide;
  double total = 0;
  for (int64_t start = 0; start < n; start += whole) {
    const int64_t count = n - start < whole ? n - start : whole;
    const void *h = widened(sums, wire, &wide, after(half, start, from), count);
    char *place = (char *)correction + start * to;
    void *near = fresh && stream ? (void *)&block : place;
    const double square = SUMS(sums, weigh, near, h, 2 * weight, count, fresh);
    if (near != (void *)place) stream_copy(place, near, (size_t)(count * to));
    total += 4 * (square <= 1e38 ? square : SUMS(sums, square, h, (const void *)NULL, count));
  }
  fence(stream);
  return total;
}

/* rest = x - q where the rounded q is finite, else 0. Returns whether any number of rest is not 0. */
ADPSGD_VECTOR static int rest_of(float *restrict rest, const float *restrict x, const float *restrict q, int64_t n) {
  uint32_t held = 0;
  for (int64_t i = 0; i < n; i++) {
    const uint32_t finite = infinite_f32(q[i]) - 1; /* a mask, since a branch is not vectorised */
    const float d = x[i] - q[i];
    uint32_t u;
    memcpy(&u, &d, sizeof u);
    u &= finite;
    memcpy(&rest[i], &u, sizeof u);
    held |= u << 1;
  }
  return held != 0;
}

/* The 16-bit parameters become the rounded sums. The rounding errors go into `back` (NULL: they are
 * dropped), the slot that is applied next, so that corrections below half a unit in the last place are not
 * lost. */
static int apply_block_16(int dtype, void *parameter, const float *correction, float *back, int64_t n,
                          int replace, int fresh, int stream) {
  _Alignas(LINE_NBYTES) float x[BLOCK], q[BLOCK], rest[BLOCK];
  int found;
  if (replace) {
    memcpy(x, correction, (size_t)n * sizeof(float));
  } else {
    adpsgd_widen(dtype, x, parameter, n);
    (void)increase_f32(x, correction, n);
  }
  found = adpsgd_narrow(dtype, parameter, x, n) ? ADPSGD_NOT_FINITE : 0;
  if (!back) return found;
  adpsgd_widen(dtype, q, parameter, n);
  if (rest_of(rest, x, q, n)) found |= ADPSGD_HELD_BACK;
  if (fresh) copy_block(back, rest, n * (int64_t)sizeof(float), stream);
  else (void)increase_f32(back, rest, n);
  return found;
}

/* Return how many of n numbers are in the block that begins at `start`: a whole block, or the rest. The
 * first block is shorter if the mirror does not begin at a cache line (as behind a tensor of odd size), so
 * that no line is in two blocks: stores past the caches would write it in two parts. */
static int64_t next_block(const void *mirror, int itemsize, int64_t start, int64_t n, int64_t whole) {
  const int64_t over = start ? 0 : (int64_t)((uintptr_t)mirror % LINE_NBYTES) / itemsize;
  return n - start < whole - over ? n - start : whole - over;
}

/* Works block by block, so that the mirror is copied from the first-level cache. */
int adpsgd_apply(int dtype, void *parameter, const void *correction, void *mirror, void *back,
                 int64_t n, int replace, int fresh, int stream) {
  const int64_t whole = block_of(adpsgd_slot_dtype(dtype));
  const int size = adpsgd_itemsize(dtype), wide = adpsgd_slot_itemsize(dtype);
  int found = 0;
  for (int64_t start = 0, count; start < n; start += count) {
    count = next_block(mirror, size, start, n, whole);
    char *p = (char *)parameter + start * size;
    const void *c = after(correction, start, wide);
    if (stream) {
      ahead(p + whole * size, whole * size);
      ahead(after(c, whole, wide), whole * wide);
    }
    if (c && size == 2) {
      found |= apply_block_16(dtype, p, c, back ? (float *)back + start : NULL, count, replace, fresh, stream);
    } else if (c && !replace) {
      found |= SUMS(dtype, increase, (void *)p, c, count) ? ADPSGD_NOT_FINITE : 0;
    } else {
      if (c) memcpy(p, c, (size_t)(count * size));
      found |= inspect(dtype, p, count) ? ADPSGD_NOT_FINITE : 0;
    }
    if (mirror) copy_block((char *)mirror + start * size, p, count * size, stream);
  }
  return found;
}

/* Makes two passes over the chunk, which is in the caches, because a sum that is not finite must change
 * nothing. If squares or multiples are too large for the type of sums, double precision is used. */
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
  ADPSGD_VECTOR static double merge_mean_##A(A *restrict slot, const A *restrict sum,                \
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

MEAN(f32)
MEAN(f64)

double adpsgd_merge_mean(int dtype, void *slot, const void *sum, const void *own, double learners,
                         int64_t n, int fresh, int replace) {
  if (dtype == ADPSGD_FLOAT64) return merge_mean_f64(slot, sum, own, learners, n, fresh, replace);
  return merge_mean_f32(slot, sum, own, learners, n, fresh, replace);
}

/* A large number has one of the two largest exponents; infinity and NaN have the largest. */
ADPSGD_VECTOR static int any_large_f32(const f32 *restrict x, int64_t n) {
  uint32_t found = 0, u;
  for (int64_t i = 0; i < n; i++) {
    memcpy(&u, &x[i], sizeof u);
    found |= (u & 0x7F000000u) == 0x7F000000u;
  }
  return found != 0;
}

ADPSGD_VECTOR static int any_large_f64(const f64 *restrict x, int64_t n) {
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
