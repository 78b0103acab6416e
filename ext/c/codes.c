#include "codes.h"

#include <math.h>
#include <string.h>

#include "narrow.h"

#define B ADPSGD_CODES_BLOCK
#define INLINE static inline __attribute__((always_inline))

/* The step 1. Others are ONE + their power of two. */
enum { ONE = 2048 };
/* A step is at least 2^-20 of the block's largest number, so that numbers in steps fit in 22 bits; with 16 bits
 * at least 2^-13, so that the difference of two numbers fits in 16. */
enum { DIGITS = 20, DIGITS_16 = 13 };
/* By how many powers of two a step grows where a block has wrapped. */
enum { LEAP = 3 };
/* Mean size of differences that are spread over the range, in halves of it: what is known of a block that was
 * passed over. */
#define UNIFORM 0.58
/* By how many powers of two a step of 4 bits is coarser than one of 8, for the same differences: the range has
 * 1/16 of the steps, and no room to spare. */
enum { COARSER = 3 };

typedef union {
  float f32[B];
  double f64[B];
} Numbers;

static double power(int step) { return ldexp(1.0, step - ONE); }

INLINE int coarser(int bits) { return bits == 4 ? COARSER : 0; }

/* A step is not above the largest number of the type `sums`, and half of it is not below the smallest. */
static int clamp(int sums, int step) {
  const int finest = ONE - (sums == ADPSGD_FLOAT64 ? 1073 : 148);
  const int coarsest = ONE + (sums == ADPSGD_FLOAT64 ? 1023 : 127);
  return step < finest ? finest : step > coarsest ? coarsest : step;
}

int64_t adpsgd_codes_blocks(int64_t n) { return (n + B - 1) / B; }

int adpsgd_codes_bits(int format) {
  switch (format) {
    case ADPSGD_INT4: return 4;
    case ADPSGD_INT8: return 8;
    case ADPSGD_INT16: return 16;
    default: return 0;
  }
}

int adpsgd_codes_format(const void *message) { return *(const uint16_t *)message; }

int64_t adpsgd_codes_nbytes(int format, int64_t n) {
  return (1 + adpsgd_codes_blocks(n)) * (int64_t)sizeof(uint16_t) + (n * adpsgd_codes_bits(format) + 7) / 8;
}

/* ---- one block ------------------------------------------------------------------------------ */

/* The largest size of a number. */
ADPSGD_VECTOR static double largest_f32(const float *restrict x, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; i++) {
    uint32_t u;
    memcpy(&u, &x[i], sizeof u);
    u &= 0x7FFFFFFFu;
    largest = u > largest ? u : largest;
  }
  float found;
  memcpy(&found, &largest, sizeof found);
  return found;
}

ADPSGD_VECTOR static double largest_f64(const double *restrict x, int64_t n) {
  uint64_t largest = 0;
  for (int64_t i = 0; i < n; i++) {
    uint64_t u;
    memcpy(&u, &x[i], sizeof u);
    u &= 0x7FFFFFFFFFFFFFFFu;
    largest = u > largest ? u : largest;
  }
  double found;
  memcpy(&found, &largest, sizeof found);
  return found;
}

/* q = round(x first second) modulo 2^22 or more, in two's complement: the sum's last bits are the integer. */
ADPSGD_VECTOR static void grid_f32(int32_t *restrict q, const float *restrict x, float first, float second,
                                   int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const float sum = x[i] * first * second + 0x1.8p23f;
    uint32_t u;
    memcpy(&u, &sum, sizeof u);
    q[i] = (int32_t)(u - 0x4B400000u); /* the bits of 0x1.8p23f */
  }
}

ADPSGD_VECTOR static void grid_f64(int32_t *restrict q, const double *restrict x, double first, double second,
                                   int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const double sum = x[i] * first * second + 0x1.8p52;
    uint64_t u;
    memcpy(&u, &sum, sizeof u);
    q[i] = (int32_t)(uint32_t)u;
  }
}

ADPSGD_VECTOR static float sum_of_squares(const int32_t *restrict d, int64_t n) {
  float squares = 0;
  _Pragma("omp simd reduction(+ : squares)") for (int64_t i = 0; i < n; i++)
    squares += (float)d[i] * (float)d[i];
  return squares;
}

/* d = a - b modulo 2^bits, from 1 - half to half - 1; -half, of which the sign is not known, counts as 0.
 * Returns the sum of squares. */
ADPSGD_VECTOR static float centre(int32_t *restrict d, const int32_t *restrict a, const int32_t *restrict b,
                                  int32_t half, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const uint32_t x = ((uint32_t)a[i] - (uint32_t)b[i] + (uint32_t)half) & (uint32_t)(2 * half - 1);
    d[i] = (int32_t)(x ? x : (uint32_t)half) - half;
  }
  return sum_of_squares(d, n);
}

/* q = q / 2^by, rounded; `by` is 1 or more, and q has 16 bits. */
ADPSGD_VECTOR static void coarsen(int32_t *restrict q, int by, int64_t n) {
  by = by < 17 ? by : 17; /* zeros from there on */
  for (int64_t i = 0; i < n; i++) q[i] = (q[i] + (1 << (by - 1))) >> by;
}

/* d = a - b, at most `most` in size; 0 where it is one step, which is more often rounding than a difference. */
ADPSGD_VECTOR static void subtract(int32_t *restrict d, const int32_t *restrict a, const int32_t *restrict b,
                                   int32_t most, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const int32_t x = (int32_t)((uint32_t)a[i] - (uint32_t)b[i]);
    d[i] = x > most ? most : x < -most ? -most : x * x == 1 ? 0 : x;
  }
}

/* Little-endian, as the processors that this library runs on. */
ADPSGD_VECTOR static void pack(int bits, uint8_t *restrict out, const int32_t *restrict q, int64_t n) {
  if (bits == 16) {
    for (int64_t i = 0; i < n; i++) {
      const int16_t code = (int16_t)q[i];
      memcpy(out + 2 * i, &code, sizeof code);
    }
  } else if (bits == 8) {
    for (int64_t i = 0; i < n; i++) out[i] = (uint8_t)q[i];
  } else {
    for (int64_t i = 0; i < (n + 1) / 2; i++) out[i] = (uint8_t)((q[2 * i] & 15) | (q[2 * i + 1] & 15) << 4);
  }
}

/* The codes as signed numbers. */
ADPSGD_VECTOR static void unpack(int bits, int32_t *restrict q, const uint8_t *restrict in, int64_t n) {
  if (bits == 16) {
    for (int64_t i = 0; i < n; i++) {
      int16_t code;
      memcpy(&code, in + 2 * i, sizeof code);
      q[i] = code;
    }
  } else if (bits == 8) {
    for (int64_t i = 0; i < n; i++) q[i] = (int8_t)in[i];
  } else {
    for (int64_t i = 0; i < (n + 1) / 2; i++) {
      q[2 * i] = (in[i] & 15) - 2 * (in[i] & 8);
      q[2 * i + 1] = (in[i] >> 4) - 2 * (in[i] >> 4 & 8);
    }
  }
}

#define INCREASE(A)                                                                                        \
  ADPSGD_VECTOR static void increase_##A(A *restrict x, const int32_t *restrict d, A unit, int64_t n, int fresh) { \
    if (fresh)                                                                                             \
      for (int64_t i = 0; i < n; i++) x[i] = unit * (A)d[i];                                               \
    else                                                                                                   \
      for (int64_t i = 0; i < n; i++) x[i] += unit * (A)d[i];                                              \
  }

INCREASE(float)
INCREASE(double)

ADPSGD_VECTOR static int32_t largest(const int32_t *restrict d, int64_t n) {
  int32_t found = 0;
  for (int64_t i = 0; i < n; i++) {
    const int32_t size = d[i] < 0 ? -d[i] : d[i];
    found = size > found ? size : found;
  }
  return found;
}

/* ---- the blocks of a chunk --------------------------------------------------------------------- */

static const void *at(const void *x, int64_t nbytes) { return x ? (const char *)x + nbytes : NULL; }

/* x = a block of the model. Returns as adpsgd_snapshot. */
static int read_block(Numbers *x, const adpsgd_model *m, int sums, int64_t start, int64_t n) {
  const int64_t size = adpsgd_itemsize(m->dtype), wide = adpsgd_itemsize(sums);
  return adpsgd_snapshot(m->dtype, sums, x, at(m->base, start * size), at(m->first, start * wide),
                         at(m->second, start * wide), n);
}

/* q = a block in steps. In two factors, because the inverse of a small step is not finite. */
static void grid(int sums, int32_t *q, const Numbers *x, int step, int64_t n) {
  const int half = (ONE - step) / 2;
  const double first = power(ONE + half), second = power(ONE + (ONE - step) - half);
  if (sums == ADPSGD_FLOAT64) grid_f64(q, x->f64, first, second, n);
  else grid_f32(q, x->f32, (float)first, (float)second, n);
}

/* The largest step that is not above a block's largest number; 0 for zeros. */
static int top(int sums, const Numbers *x, int64_t n) {
  const double found = sums == ADPSGD_FLOAT64 ? largest_f64(x->f64, n) : largest_f32(x->f32, n);
  int exponent = 0;
  frexp(found, &exponent);
  return found > 0 ? ONE + exponent - 1 : 0;
}

/* By how many powers of two a step may be finer than the block's largest number. A difference of 16-bit numbers
 * is a multiple of their last place, which is not to be one of the range. */
static int digits_of(int bits, int dtype) {
  const int places = dtype == ADPSGD_BFLOAT16 ? 7 : dtype == ADPSGD_FLOAT16 ? 10 : DIGITS;
  const int digits = places + bits - 2;
  return bits == 16 ? DIGITS_16 : digits < DIGITS ? digits : DIGITS;
}

int adpsgd_codes_offer(int format, int sums, void *out, const adpsgd_model *mine, const uint16_t *steps, int64_t n) {
  const int bits = adpsgd_codes_bits(format);
  uint16_t *head = (uint16_t *)out + 1;
  uint8_t *codes = (uint8_t *)(head + adpsgd_codes_blocks(n));
  int32_t q[B + 1] = {0};
  Numbers x;
  int bad = 0;
  *(uint16_t *)out = (uint16_t)format;
  for (int64_t start = 0, k = 0; start < n; start += B, k++) {
    const int64_t count = n - start < B ? n - start : B;
    const int step = steps[k] + coarser(bits); /* the table has those of 8 bits */
    int finest;
    bad |= read_block(&x, mine, sums, start, count);
    finest = top(sums, &x, count) - digits_of(bits, mine->dtype);
    head[k] = (uint16_t)clamp(sums, bits == 16 || step < finest ? finest : step);
    grid(sums, q, &x, head[k], count);
    pack(bits, codes + start * bits / 8, q, count);
  }
  return bad;
}

int adpsgd_codes_answer(int sums, void *out, const void *offer, const adpsgd_model *mine, int64_t n) {
  const int bits = adpsgd_codes_bits(adpsgd_codes_format(offer));
  const int64_t nblocks = adpsgd_codes_blocks(n);
  const int32_t half = 1 << (bits - 1);
  const double limit = 0.45 * half; /* spread over the range they have UNIFORM */
  const uint16_t *steps = (const uint16_t *)offer + 1;
  const uint8_t *codes = (const uint8_t *)(steps + nblocks);
  uint16_t *head = (uint16_t *)out + 1;
  uint8_t *answer = (uint8_t *)(head + nblocks);
  int32_t theirs[B + 1], ours[B + 1] = {0}, d[B + 1] = {0};
  Numbers x;
  int bad = 0;
  *(uint16_t *)out = *(const uint16_t *)offer;
  for (int64_t start = 0, k = 0; start < n; start += B, k++) {
    const int64_t count = n - start < B ? n - start : B;
    const int offered = clamp(sums, steps[k]);
    bad |= read_block(&x, mine, sums, start, count);
    const int finest = top(sums, &x, count) - (bits == 16 ? DIGITS_16 : DIGITS);
    const int far = offered < finest; /* our numbers are not on the grid of the offer */
    head[k] = (uint16_t)(far ? finest : offered);
    unpack(bits, theirs, codes + start * bits / 8, count);
    grid(sums, ours, &x, head[k], count);
    if (bits == 16) { /* nothing has wrapped */
      if (far) coarsen(theirs, finest - offered, count);
      subtract(d, theirs, ours, half - 1, count);
    } else if (centre(d, theirs, ours, half, count) > limit * limit * (double)count || far)
      for (int64_t i = 0; i < count; i++) d[i] = -half; /* nobody merges it */
    pack(bits, answer + start * bits / 8, d, count);
  }
  return bad;
}

/* Return the step of a block's next offer in `next` bits; its largest difference is now m steps. The next one is
 * to be 1/8 to 1/3 of the range of 8 bits, so that one three times as large does not wrap; of 4 bits, which are
 * too few for that, 1/4 to 1/2. */
static int next_step(int step, int32_t m, int bits, int next) {
  const int32_t half = 1 << (bits - 1);
  const int most = next == 8 ? half / 3 : half / 2, least = next == 8 ? half / 8 : half / 4;
  int digits = 0;
  if (bits == next) return m > most ? step + 1 : m <= least ? step - 1 : step;
  while (m >> digits) digits++;
  return step + digits - (next == 8 ? 5 : 2); /* 2^digits, above m, is 32 steps of 128, or 4 of 8 */
}

double adpsgd_codes_merge(int next, int sums, void *correction, const void *answer, double weight,
                          uint16_t *steps, int64_t n, int fresh) {
  const int64_t nblocks = adpsgd_codes_blocks(n);
  const int bits = adpsgd_codes_bits(adpsgd_codes_format(answer)), next_bits = adpsgd_codes_bits(next);
  const int32_t half = 1 << (bits - 1);
  const uint16_t *head = (const uint16_t *)answer + 1;
  const uint8_t *codes = (const uint8_t *)(head + nblocks);
  int32_t d[B + 1];
  double total = 0;
  for (int64_t start = 0, k = 0; start < n; start += B, k++) {
    const int64_t count = n - start < B ? n - start : B;
    const int step = clamp(sums, head[k]);
    const double size = power(step), unit = sums == ADPSGD_FLOAT64 ? weight * size : (float)(weight * size);
    int then = step + LEAP;
    unpack(bits, d, codes + start * bits / 8, count);
    const double most = unit * largest(d, count);
    if (d[0] == -half || !isfinite(sums == ADPSGD_FLOAT64 ? most : (float)most)) {
      memset(d, 0, sizeof d);
      total += UNIFORM * UNIFORM * (double)half * (double)half * (double)count * size * size;
    } else then = next_step(step, largest(d, count), bits, next_bits);
    if (steps) steps[k] = (uint16_t)clamp(sums, then - coarser(next_bits));
    if (sums == ADPSGD_FLOAT64) increase_double((double *)correction + start, d, unit, count, fresh);
    else increase_float((float *)correction + start, d, (float)unit, count, fresh);
    total += (double)sum_of_squares(d, count) * size * size;
  }
  return total;
}
