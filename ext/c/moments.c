#include "moments.h"

#include <float.h>
#include <math.h>

#include "kernels.h"
#include "narrow.h"

#define PASSES(T, MAX)                                                                                   \
  ADPSGD_VECTOR static void correct_##T(T *restrict second, T *restrict own, const T *restrict gradient, \
                                        const T *restrict parameter, const T *restrict moment,           \
                                        T *restrict cross, const adpsgd_second *law, int64_t n) {        \
    const T decay = (T)law->decay, rest = 1 - decay, known = (T)law->known, share = (T)law->share;       \
    const T lacking = (T)law->lacking, l2 = (T)law->l2, a = (T)law->first, fewest = (T)(1 / law->bound); \
    const T whole = (T)(1 / law->known), most = (T)(ADPSGD_MOST / law->known);                           \
    for (int64_t i = 0; i < n; i++) {                                                                    \
      T g = gradient[i] + l2 * parameter[i];                                                             \
      T fresh = (rest * g) * g; /* as torch: g * g overflows earlier */                                  \
      T mine = decay * second[i] + fresh;                                                                \
      T next = a * moment[i] + (1 - a) * g;                                                              \
      T square = next * next, least = next * (next * fewest);                                            \
      T limit = most * (square > mine ? square : mine);                                                  \
      T x = cross[i];                                                                                    \
      x = x > limit ? limit : x;                                                                         \
      x = x < -limit ? -limit : x;                                                                       \
      x = least > mine && least * whole > x ? least * whole : x;                                         \
      T mean = known * x + lacking * mine;                                                               \
      mean = mean < 0 ? 0 : mean; /* what is not a number stays so */                                    \
      cross[i] = x < MAX ? x : MAX;                                                                      \
      own[i] = mine;                                                                                     \
      T given = (mean + share * (mine - mean) - fresh) / decay;                                          \
      given = given - given == 0 ? given : (T)INFINITY; /* moments of peers are too large: no step */    \
      second[i] = mine - mine == 0 ? given : second[i]; /* unless own is infinite or not a number */     \
    }                                                                                                    \
  }                                                                                                      \
  ADPSGD_VECTOR static void multiply_##T(T *restrict cross, const T *restrict moment,                    \
                                         const T *restrict before, const T *restrict offered, T rate,    \
                                         T scale, T known, int64_t n, int64_t *arrived, int64_t *live) { \
    int64_t with = 0, nonzero = 0;                                                                       \
    for (int64_t i = 0; i < n; i++) {                                                                    \
      T added = moment[i] - before[i];                                                                   \
      T product = offered[i] * (offered[i] + scale * added) / known;                                     \
      product = product < MAX ? product : MAX; /* else an infinite one stays in cross for good */        \
      product = product > -MAX ? product : -MAX;                                                         \
      int has = added != 0;                                                                              \
      cross[i] += has ? rate * (product - cross[i]) : 0;                                                 \
      with += has;                                                                                       \
      nonzero += has | (offered[i] != 0);                                                                \
    }                                                                                                    \
    *arrived = with;                                                                                     \
    *live = nonzero;                                                                                     \
  }

PASSES(float, FLT_MAX / 4)
PASSES(double, DBL_MAX / 4)

void adpsgd_correct(int dtype, void *second, void *own, const void *gradient, const void *parameter,
                    const void *moment, void *cross, const adpsgd_second *law, int64_t n) {
  if (dtype == ADPSGD_FLOAT64)
    correct_double(second, own, gradient, parameter, moment, cross, law, n);
  else
    correct_float(second, own, gradient, parameter, moment, cross, law, n);
}

void adpsgd_multiply(int dtype, void *cross, const void *moment, const void *before, const void *offered,
                     const adpsgd_product *law, int64_t n, int64_t *arrived, int64_t *live) {
  if (dtype == ADPSGD_FLOAT64)
    multiply_double(cross, moment, before, offered, law->rate, law->scale, law->known, n, arrived, live);
  else
    multiply_float(cross, moment, before, offered, (float)law->rate, (float)law->scale, (float)law->known, n,
                   arrived, live);
}
